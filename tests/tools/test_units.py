"""Tests how sizes and rates are read and written."""

import pytest

from mpiring import ConfigError
from mpiring.tools.units import (
    parse_count, parse_rate, parse_size, parse_sizes, parse_time, ranks_on_nodes,
    size_text, span)


@pytest.mark.parametrize(("text", "nbytes"), [
    ("8", 8), ("8B", 8), ("64K", 65536), ("64k", 65536), ("64KiB", 65536), ("64KB", 64000),
    ("1M", 1 << 20), ("20MB", 20_000_000), ("1.5MiB", 3 << 19), ("2G", 2 << 30),
    (" 16 MiB ", 1 << 24),
])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


def test_no_sizes():
    for text in ("", "M", "-1", "8 apples", "1T"):
        with pytest.raises(ConfigError, match="expected a number of bytes"):
            parse_size(text)
    for text in ("0", "0KiB", "0.5", "8,0", "0..64"):
        with pytest.raises(ConfigError, match="expected 1 byte or more"):
            parse_sizes(text)
    assert parse_size("0", least=0) == 0


def test_lists_and_ranges():
    assert parse_sizes("1M,8,64K,8") == [8, 65536, 1 << 20]
    assert parse_sizes("8..1K") == [8, 16, 64, 256, 1024]
    assert parse_sizes("4..4,1..16") == [1, 4, 16]
    default = parse_sizes("8..64M")
    assert default[0] == 8 and {64 << 10, 1 << 20, 64 << 20} <= set(default)
    with pytest.raises(ConfigError, match="from small to large"):
        parse_sizes("64M..8")


def test_rates():
    assert parse_rate("1gbit") == 125e6 and parse_rate("2.5Mbit") == 312500
    with pytest.raises(ConfigError, match="as 1gbit"):
        parse_rate("1GB")
    assert parse_rate("5GB/s") == 5e9 and parse_rate("100mB/s") == 1e8
    with pytest.raises(ConfigError, match="expected"):
        parse_rate("0gbit")


def test_counts():
    assert [parse_count(text) for text in ("7", "50k", "13M", "1.5G")] == [
        7, 50_000, 13_000_000, 1_500_000_000]
    for text in ("", "0", "0.5", "13MB", "M"):
        with pytest.raises(ConfigError, match="expected one above 0, as 13M"):
            parse_count(text)


def test_times():
    assert [parse_time(text) for text in ("2us", "2µs", "1.5ms", "500ns", "3 s")] == [
        pytest.approx(seconds) for seconds in (2e-6, 2e-6, 1.5e-3, 5e-7, 3)]
    for text in ("2", "us", "-1s", "2min"):
        with pytest.raises(ConfigError, match="as 2us"):
            parse_time(text)


def test_sizes_as_text():
    for nbytes, text in ((0, "0 B"), (65536, "64 KiB"), (20_000_000, "20000000 B"),
                         (1 << 20, "1 MiB"), (3 << 30, "3 GiB")):
        assert size_text(nbytes) == text


def test_counts_and_spans():
    assert ranks_on_nodes(1, 2) == "1 rank on 2 nodes"
    assert span([3]) == "3" and span([4, 2, 3]) == "2 to 4"
