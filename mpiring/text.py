"""Writes counts, sizes, times, ranges of ranks and lists of names as text."""

from collections.abc import Iterable, Sequence


def count(number: int, noun: str) -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def seconds(duration_s: float) -> str:
    """Return "1.50 s", "12.3 ms" or "4.2 µs"."""
    if duration_s >= 1:
        return f"{duration_s:.2f} s"
    return f"{duration_s * 1e3:.1f} ms" if duration_s >= 1e-3 else f"{duration_s * 1e6:.1f} µs"


def size(nbytes: int) -> str:
    """Return "512 B", "1.5 KiB", "2.0 MiB" or "3.0 GiB"."""
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    exponent = min(nbytes.bit_length() - 1, 39) // 10
    return f"{nbytes / (1 << 10 * exponent):.1f} {' KMG'[exponent]}iB"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers, in their order, as ranges: "0-3,8"."""
    bounds: list[list[int]] = []
    for number in numbers:
        if bounds and number == bounds[-1][-1] + 1:
            bounds[-1][1:] = [number]
        else:
            bounds.append([number])
    return ",".join("-".join(map(str, ends)) for ends in bounds)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 4-7" or "ranks 0,2,4-7"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(sorted(ranks))}"


def first_few(items: Sequence[str], most: int, between: str = ", ") -> str:
    """Join the first `most` items, and add how many more there are."""
    more = len(items) - most
    return between.join([*items[:most], *[f"and {more} more"] * (more > 0)])
