"""Tests that arguments which are no numbers, or not in range, are named with what was expected."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mpiring import ConfigError
from mpiring.arguments import number, path, truth, whole_number
from mpiring.progress import Progress
from mpiring.reducers import Int8, OneBit, PowerSGD, TopK


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_whole_numbers(value):
    checked = whole_number("n", value, 0, 3)
    assert checked == 3 and type(checked) is int


@pytest.mark.parametrize("value", [
    None, "3", 3.0, np.float32(3), True, np.True_, [3], np.array([1, 2]), -1, 4, 1 << 70, 3j])
def test_what_is_no_whole_number_in_range(value):
    with pytest.raises(ConfigError, match="n=.*: expected a whole number from 0 to 3$"):
        whole_number("n", value, 0, 3)


def test_limits_are_told():
    with pytest.raises(ConfigError, match="n=-1: expected a whole number of at least 0$"):
        whole_number("n", -1, 0)
    with pytest.raises(ConfigError, match="n='a': expected a whole number$"):
        whole_number("n", "a")
    assert whole_number("n", -5) == -5


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5), np.longdouble(0.5)])
def test_numbers(value):
    checked = number("x", value, lambda x: 0 < x <= 1, "a share")
    assert checked == 0.5 and type(checked) is float


@pytest.mark.parametrize("value", [
    None, "0.5", True, 2, math.nan, np.array([0.5]), [0.5], 0.5j, np.complex64(0.5), 10**400,
    Fraction(-10**400)])
def test_what_is_no_number_in_range(value):
    with pytest.raises(ConfigError, match="x=.*: expected a share$"):
        number("x", value, lambda x: 0 < x <= 1, "a share")


def test_truth():
    assert [truth("b", value) for value in (True, False, np.True_, np.False_)] == [1, 0, 1, 0]
    for value in ("no", "", 0, 1, None, np.array(True)):
        with pytest.raises(ConfigError, match="b=.*: expected True or False$"):
            truth("b", value)


def test_paths():
    assert path("p", "a/b") == path("p", Path("a/b")) == "a/b"
    for value in (3, None, ["a"]):
        with pytest.raises(ConfigError, match="p=.*: expected a path"):
            path("p", value)


@pytest.mark.parametrize(("make", "told"), [
    (lambda: TopK("a"), "density='a': expected a number above 0 and up to 1"),
    (lambda: TopK(momentum="a"), "momentum='a': expected a number from 0 to below 1"),
    (lambda: TopK(clip_norm="a"), "clip_norm='a': expected a number above 0, or None"),
    (lambda: TopK(warmup_steps="a"), "warmup_steps='a': expected a whole number of at least 0"),
    (lambda: PowerSGD("a"), "rank='a': expected a whole number of at least 1"),
    (lambda: PowerSGD(min_compression="a"), "min_compression='a': expected a factor above 0"),
    (lambda: Int8("a"), "block='a': expected a whole number of at least 1"),
    (lambda: OneBit(warmup_steps=1.5), "warmup_steps=1.5: expected"),
    (lambda: Progress("a", None), "total=None: expected a whole number of at least 0"),
    (lambda: Progress("a", 3, lines_every_s="x"), "lines_every_s='x': expected seconds"),
    (lambda: Progress("a", 3, metrics=3), "metrics=3: expected a path"),
])
def test_what_cannot_work_is_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_metrics_are_numbers_and_texts(tmp_path):
    with Progress("a", 3, metrics=tmp_path / "m") as progress:
        for step, value in ((1, object()), (1, np.ones(3)), (object(), 1.0)):
            with pytest.raises(ConfigError, match=r"record\(.*, loss\): .*pass whole numbers"):
                progress.record(step, loss=value)
        progress.record(1, loss=np.float32(0.5))
    assert (tmp_path / "m").read_text().count("\n") == 1
