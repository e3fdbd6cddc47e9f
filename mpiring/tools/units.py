"""Parses and formats sizes, rates, times and counts."""

import re
from collections.abc import Mapping, Sequence

from .. import ConfigError
from ..provisional import count

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ/]*)", re.IGNORECASE)
# Values of units, in lower case.
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3}
_COUNTS = {prefix: 1000 ** power for prefix, power in _PREFIXES.items()}
_SIZES = {f"{prefix}{unit}": base ** power for prefix, power in _PREFIXES.items()
          for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))}
_RATES = {f"{prefix}{unit}": factor / bits for prefix, factor in _COUNTS.items()
          for unit, bits in (("bit", 8), ("b/s", 1))}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_RANGE_FACTOR = 4
# Larger sizes, rates (in bytes per second), counts, and times (in seconds) are typing errors.
_MOST_BYTES, _MOST_PER_S, _MOST, _MOST_S = 1 << 50, 10**15, 10**12, 10**6


def _value(text: str, units: Mapping[str, float]) -> float | None:
    """Return the value of a number with a unit; None for other strings."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        return None
    return float(match[1]) * units[match[2].lower()]


def parse_size(text: str, least: int = 1, most: int = _MOST_BYTES) -> int:
    """Return a number of bytes: 65,536 for "64K" and "64KiB", 64,000 for "64KB".

    It raises ConfigError for other text, and outside the limits, as the other parsers here do.
    """
    nbytes = _value(text, _SIZES)
    if nbytes is None:
        raise ConfigError(f"size {text!r}: expected a number of bytes, as 8, 64K, 1MiB or 20MB")
    if nbytes < least:
        raise ConfigError(f"size {text!r}: expected {least} byte or more")
    if nbytes > most:
        raise ConfigError(f"size {text!r:.80}: expected at most {size_text(most)}")
    return int(nbytes)


def parse_sizes(text: str) -> list[int]:
    """Return the sizes in a list, "8,64K,1M", or in a range of factors of 4, "8..64M".

    A range includes its end and its start; the factors count from the end.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        start, dots, stop = part.partition("..")
        if not dots:
            sizes.add(parse_size(part))
            continue
        first, size = parse_size(start), parse_size(stop)
        if first > size:
            raise ConfigError(f"sizes {part!r}: expected a range from small to large, as 8..64M")
        sizes.add(first)
        while size > first:
            sizes.add(size)
            size //= _RANGE_FACTOR
    return sorted(sizes)


def parse_rate(text: str) -> float:
    """Return bytes per second, up to 1 PB/s: 125,000,000 for "1gbit", 5,000,000,000 for "5GB/s"."""
    rate = _value(text, _RATES)
    if not rate:
        raise ConfigError(f"rate {text!r}: expected a number with kbit, mbit or gbit, as 1gbit, "
                          f"or with bytes, as 5GB/s")
    if not 1 <= rate <= _MOST_PER_S:
        raise ConfigError(f"rate {text!r:.80}: expected 1 B/s to 1000000 GB/s")
    return rate


def parse_count(text: str) -> int:
    """Return a count from 1 to 1000G: 13,000,000 for "13M"."""
    count = _value(text, _COUNTS) or 0
    if count < 1:
        raise ConfigError(f"number {text!r}: expected one above 0, as 13M")
    if count > _MOST:
        raise ConfigError(f"number {text!r:.80}: expected at most {_MOST}")
    return int(count)


def parse_time(text: str) -> float:
    """Return at most a million seconds: 0.000002 for "2us"."""
    seconds = _value(text, _TIMES)
    if seconds is None:
        raise ConfigError(f"time {text!r}: expected a number with ns, us, ms or s, as 2us")
    if seconds > _MOST_S:
        raise ConfigError(f"time {text!r:.80}: expected at most {_MOST_S} s")
    return seconds


def size_text(nbytes: float) -> str:
    """Return a size in the largest unit that divides it: "64 KiB", "20000000 B"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes % 1024 or not nbytes:
            return f"{nbytes:.0f} {unit}"
        nbytes //= 1024
    return f"{nbytes:.0f} GiB"


def ranks_on_nodes(ranks: int, nodes: int) -> str:
    """Return "4 ranks on 1 node"."""
    return f"{count(ranks, 'rank')} on {count(nodes, 'node')}"


def span(numbers: Sequence[int]) -> str:
    """Return the least and the largest number, as "2 to 4"; "2" if they are the same."""
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"
