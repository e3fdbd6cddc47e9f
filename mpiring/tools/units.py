"""Reads sizes, rates, times and counts from text, and writes sizes."""

import re

from ..errors import ConfigError

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(iB|B)?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)(bit|B/s)", re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_RANGE_FACTOR = 4


def parse_size(text: str, least: int = 1) -> int:
    """Return a number of bytes, 65,536 of "64K" and "64KiB", 64,000 of "64KB".

    Raises:
        ConfigError: Not a size, or less than `least`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"size {text!r}: expected a number of bytes, as 8, 64K, 1MiB or 20MB")
    number, prefix, unit = match.groups()
    base = 1000 if (unit or "").upper() == "B" and prefix else 1024
    nbytes = int(float(number) * base ** _PREFIXES[prefix.upper()])
    if nbytes < least:
        raise ConfigError(f"size {text!r}: expected {least} byte or more")
    return nbytes


def parse_sizes(text: str) -> list[int]:
    """Return the sizes in a list, "8,64K,1M", or in a range of factors of 4, "8..64M".

    A range is counted down from its end, so that the end is in it; so is the start.

    Raises:
        ConfigError: Not a size, or a range that runs backwards.
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
    """Return bytes per second: "1gbit" is 125,000,000, "5GB/s" is 5,000,000,000.

    Raises:
        ConfigError: Not a rate.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"rate {text!r}: expected a number with kbit, mbit or gbit, as 1gbit, "
                          f"or with bytes, as 5GB/s")
    number, prefix, unit = match.groups()
    return float(number) * 1000.0 ** _PREFIXES[prefix.upper()] / (8 if unit.lower() == "bit" else 1)


def parse_count(text: str) -> int:
    """Return a number of things: "13M" is 13,000,000.

    Raises:
        ConfigError: Not a number above 0.
    """
    match = _COUNT.fullmatch(text)
    count = int(float(match[1]) * 1000 ** _PREFIXES[match[2].upper()]) if match else 0
    if count < 1:
        raise ConfigError(f"number {text!r}: expected one above 0, as 13M")
    return count


def parse_time(text: str) -> float:
    """Return seconds: "2us" is 0.000002.

    Raises:
        ConfigError: Not a time.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"time {text!r}: expected a number with ns, us, ms or s, as 2us")
    number, unit = match.groups()
    return float(number) * _SECONDS[unit]


def size_text(nbytes: float) -> str:
    """Return a size in the largest unit that divides it: "64 KiB", "20000000 B"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes % 1024 or not nbytes:
            return f"{nbytes:.0f} {unit}"
        nbytes //= 1024
    return f"{nbytes:.0f} GiB"
