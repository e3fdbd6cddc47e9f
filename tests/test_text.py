"""Tests how ranks, names and counts are written."""

import pytest

from mpiring.text import count, first_few, ranges, ranks_text


@pytest.mark.parametrize(("numbers", "text"), [
    ([], ""), ([3], "3"), ([0, 1, 2, 3, 8], "0-3,8"), ([4, 2, 3], "4,2-3")])
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_ranks():
    assert ranks_text([7, 4, 6, 5, 0, 2]) == "ranks 0,2,4-7" and ranks_text([3]) == "rank 3"


def test_counts_and_lists():
    assert [count(number, "rank") for number in (0, 1, 4)] == ["0 ranks", "1 rank", "4 ranks"]
    assert first_few(["a", "b"], 2) == "a, b"
    assert first_few(["a"] * 5, 2, "; ") == "a; a; and 3 more"
