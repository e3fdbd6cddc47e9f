"""Reads texts of very different lengths: the functions of Python's standard library."""

import ast
import sysconfig
from pathlib import Path

from mpiring.errors import ConfigError


def functions(count: int | None) -> list[bytes]:
    """Return the functions and methods of the standard library that runs this, as source text.

    Args:
        count: At most so many, of the first modules; None for all, some 7,000.

    Raises:
        ConfigError: There are none.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[bytes] = []
    for module in sorted(folder.glob("*.py")):
        if count is None or len(found) < count:
            found += _functions_of(module.read_bytes())
    if not found:
        raise ConfigError(f"there is no text to train on: {folder} holds no modules of the "
                          f"standard library")
    return found[:count]


def _functions_of(source: bytes) -> list[bytes]:
    """Return a module's functions, each from the line of its `def` to its last one."""
    lines = source.splitlines(keepends=True)
    return [b"".join(lines[node.lineno - 1:node.end_lineno]) for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
