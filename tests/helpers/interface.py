"""Lists the public interface: imports, calls, settings and options, as in `public_api.txt`.

`python tests/helpers/interface.py` writes that file.
"""

import argparse
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

from launching import ROOT

LIST = Path(ROOT, "tests", "public_api.txt")
REFERENCE = Path(ROOT, "docs", "reference", "api")
DIRECTIVE = re.compile(
    r"^\.\. auto(?:class|function):: ([\w.]+)(\(\))?\n(?:   :members:( .*|\n))?", re.MULTILINE)
MODULES = ["mpiring", "mpiring.asynchronous", "mpiring.data", "mpiring.elastic", "mpiring.horovod",
           "mpiring.horovod.torch", "mpiring.numpy", "mpiring.optim", "mpiring.reducers",
           "mpiring.resilience", "mpiring.torch"]


def signature_of(item):
    """Return the parameters of a callable with their defaults, without types."""
    if inspect.isclass(item) and issubclass(item, Exception):
        return "(*args)"
    signature = inspect.signature(item)
    bare = [parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values() if parameter.name != "self"]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x\w+", "", shown)


def member_of(cls, name):
    """Return a member of a class with its parameters, if it is a method."""
    member = inspect.getattr_static(cls, name, None)
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    return name + (signature_of(member) if inspect.isfunction(member) else "")


def declared():
    """Yield each function and class on the pages of the reference, and the members listed there.

    A page hides a constructor by `()` if only mpiring creates the objects and users do not import
    the class.
    """
    for path in sorted(REFERENCE.glob("*.md")):
        for name, hidden, members in DIRECTIVE.findall(path.read_text()):
            module, _, last = name.rpartition(".")
            item = getattr(importlib.import_module(module), last)
            listed = [word.strip() for word in members.split(",")] if members.strip() else [
                word for word in vars(item) if not word.startswith("_")] if members else []
            yield name, item, hidden, sorted(listed)


def documented():
    """Yield the functions, classes and members that the pages of the reference declare."""
    for name, item, hidden, members in declared():
        shown = name.rpartition(".")[2] if hidden else name
        yield shown if hidden else shown + signature_of(item)
        yield from (f"{shown}.{member_of(item, word)}" for word in members)


def exported():
    """Yield every name that a package exports."""
    for module in MODULES:
        yield from (f"from {module} import {name}"
                    for name in importlib.import_module(module).__all__)


def settings():
    from mpiring import Config
    for field in dataclasses.fields(Config):
        yield f"MPIRING_{field.name.upper()}={field.metadata['default']!r}"


def commands():
    """Yield the options of each command and of each study, from argparse."""
    from mpiring import __main__ as main

    def options_of(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from options_of(command)
            elif not isinstance(action, argparse._HelpAction):
                choices = sorted(map(str, action.choices)) if action.choices else ""
                names = action.option_strings or [action.dest]
                words = " ".join(map(str, [parser.prog, *names, *choices]))
                yield f"{words} (default {action.default!r})"

    for name in sorted(main._COMMANDS):
        parser = argparse.ArgumentParser(prog=f"python -m mpiring {name}")
        importlib.import_module(f"mpiring.tools.{name}.command").declare(parser)
        yield from options_of(parser)
    for path in sorted(Path(ROOT, "benchmarks").glob("*.py")):
        if "\ndef declare(" in path.read_text():
            parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{path.stem}")
            importlib.import_module(f"benchmarks.{path.stem}").declare(parser)
            yield from options_of(parser)


def public_api():
    return [*exported(), *documented(), *settings(), *commands()]


if __name__ == "__main__":
    LIST.write_text("\n".join(public_api()) + "\n")
