"""Reads HOROVOD_* variables."""

import pytest

from mpiring import ConfigError
from mpiring.horovod.settings import settings


@pytest.fixture
def given(monkeypatch):
    def give(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return settings()

    return give


def test_without_any_all_is_as_usual(given):
    plain = given()
    assert (plain.bucket_bytes, plain.ignored, plain.config.trace) == (None, [], "")
    assert plain.fusion_bytes > 0


def test_those_that_have_an_effect(given):
    used = given(HOROVOD_FUSION_THRESHOLD="4096", HOROVOD_TIMELINE="/tmp/t",
                 HOROVOD_STALL_CHECK_TIME_SECONDS="5", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="7",
                 HOROVOD_DYNAMIC_PROCESS_SETS="1")
    assert (used.fusion_bytes, used.bucket_bytes) == (4096, 4096)
    config = used.config
    assert (config.trace, config.stall_warning_s, config.stall_timeout_s) == ("/tmp/t", 5, 7)
    assert used.ignored == []


def test_stalls_are_not_reported_on_request(given):
    quiet = given(HOROVOD_STALL_CHECK_DISABLE="1", HOROVOD_STALL_CHECK_TIME_SECONDS="5",
                  HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0", HOROVOD_TIMELINE="DYNAMIC")
    assert quiet.config.stall_warning_s == 0 and quiet.config.stall_timeout_s == 600
    assert quiet.config.trace == "" and quiet.ignored == []


def test_fusion_can_be_switched_off(given):
    off = given(HOROVOD_FUSION_THRESHOLD="0")
    assert (off.fusion_bytes, off.bucket_bytes) == (0, None)


def test_those_of_mpiring_come_first(given):
    both = given(HOROVOD_STALL_CHECK_TIME_SECONDS="5", MPIRING_STALL_WARNING_S="9")
    assert both.config.stall_warning_s == 9


def test_others_are_ignored_and_named(given):
    ignored = given(HOROVOD_AUTOTUNE="1", HOROVOD_ADASUM_MPI_CHUNK_SIZE="3").ignored
    assert ignored == [
        "HOROVOD_ADASUM_MPI_CHUNK_SIZE=3 (unknown)",
        "HOROVOD_AUTOTUNE=1 (algorithms are measured without it, once per cluster)"]


def test_a_variable_that_is_no_number(given):
    with pytest.raises(ConfigError, match="HOROVOD_FUSION_THRESHOLD='64MB': expected a number"):
        given(HOROVOD_FUSION_THRESHOLD="64MB")
