"""Styles text in a terminal with rich, if it is installed; text for pipes and files is plain."""

import shutil
import sys
from collections.abc import Callable

# Longest line that commands print, unless a single value is longer.
WIDTH = 100


def line_width() -> int:
    """Return the length of lines that fit the terminal, at most WIDTH; WIDTH without a terminal."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)


def renderer() -> Callable[[str, str], str] | None:
    """Return a function that adds a style to text; None without a terminal, or without rich.

    The style is written as rich does, as in "bold red". Its color is ignored if the user has set
    NO_COLOR.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
        from rich.style import Style
    except ImportError:
        return None
    console = Console()
    if console.is_dumb_terminal:
        return None

    def render(text: str, style: str) -> str:
        parsed = Style.parse(style)
        return str((parsed.without_color if console.no_color else parsed).render(text))

    return render


def styled(text: str, style: str) -> str:
    """Return text with a style; unchanged where text is plain."""
    render = renderer()
    return render(text, style) if render else text
