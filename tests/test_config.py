"""Tests where settings come from, and that bad ones are refused."""

import dataclasses

import numpy as np
import pytest

from mpiring import Config, ConfigError


def test_defaults_variables_and_arguments(monkeypatch):
    assert Config().stall_timeout_s == 600 and Config().algorithm == "auto"
    monkeypatch.setenv("MPIRING_STALL_TIMEOUT_S", "5")
    monkeypatch.setenv("MPIRING_ABORT_ON_EXCEPTION", "0")
    monkeypatch.setenv("MPIRING_ALGORITHM", "ring")
    config = Config(algorithm="native")
    assert config.stall_timeout_s == 5.0 and config.abort_on_exception is False
    assert config.algorithm == "native", "an argument goes before the variable"


def test_every_field_is_described_and_has_a_default():
    for entry in dataclasses.fields(Config):
        assert f"{entry.name}:" in Config.__doc__
        assert getattr(Config(), entry.name) == entry.metadata["default"]


@pytest.mark.parametrize(("name", "value", "message"), [
    ("MPIRING_STALL_TIMEOUT", "5", "did you mean MPIRING_STALL_TIMEOUT_S"),
    ("MPIRING_COLOUR", "red", "known: MPIRING_ABORT_ON_EXCEPTION"),
    ("MPIRING_STALL_TIMEOUT_S", "soon", "MPIRING_STALL_TIMEOUT_S='soon': expected a number"),
    ("MPIRING_ABORT_ON_EXCEPTION", "maybe", "='maybe': expected .* in a variable 1 or 0"),
    *(("MPIRING_REDUCER", text, f"MPIRING_REDUCER='{text}': expected one of mean, bf16, .*topk")
      for text in ("bf17", "BF16", "bf16:4", "bf16:", "powersgd:0", "powersgd:-1", "powersgd:1.5",
                   "powersgd:", "powersgd:two", "topk:0", "topk:1.5", "topk:nan", "topk:-1",
                   "topk:inf", "1", "none")),
    ("MPIRING_TRACE", "1", "MPIRING_TRACE='1': expected a folder"),
    ("MPIRING_TUNING_FOLDER", "here", "MPIRING_TUNING_FOLDER='here': expected an absolute path"),
])
def test_bad_variables(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Config()


@pytest.mark.parametrize(("field", "value", "message"), [
    ("stall_timeout_s", -1, "Config.stall_timeout_s=-1.0: expected a finite number of seconds, 0"),
    ("stall_warning_s", float("nan"), "expected a finite number"),
    ("stall_timeout_s", np.float64(3), None),
    ("operations_in_flight", np.int64(3), None),
    ("stall_timeout_s", "3", None),
    ("operations_in_flight", 0, "expected 1 or more"),
    ("operations_in_flight", 1.5, "expected a whole number"),
    ("algorithm", 3, "expected text"),
    ("reducer", 4, "Config.reducer=4: expected text"),
    ("reducer", "topk:2", r"Config.reducer='topk:2': .* topk\[:DENSITY above 0 and up to 1"),
    ("digest_steps", -1, "Config.digest_steps=-1: expected 0 or more"),
    ("digest_action", "x", "Config.digest_action='x': expected one of stop, restore"),
])
def test_bad_arguments(field, value, message):
    if message is None:
        assert getattr(Config(**{field: value}), field) == 3
        return
    with pytest.raises(ConfigError, match=message):
        Config(**{field: value})
