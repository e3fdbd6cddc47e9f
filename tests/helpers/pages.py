"""Finds the code blocks of README and docs/, and the way to run each.

A comment is directly before every block of Python or shell commands, and every diff. Its first line
says how to run the block, in parts separated by ", ":

    ranks: 3            a program, started on 3 ranks; a diff's program is its new text
    notebook            cells of a notebook, run by one process without a launcher
    more                continues the program or the cells before it on the page
    run                 shell commands, run in a folder with links to the checkout's folders
    parse               shell commands that would take too long: only their options are parsed
    not run: a reason   the same, for commands that cannot be run here
    needs: torch        modules, separated by spaces
    fails: ConfigError  must fail, and print this

Further lines are code before the block and, after a line `---`, code after it.
"""

import importlib
import re
import shlex
from dataclasses import dataclass, field

import pytest
from jobs import run
from launching import ROOT, installed, launch, shell

import benchmarks
from mpiring.__main__ import parse

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The page whose programs need the group `clients`.
CLIENTS = ROOT / "docs" / "how_to" / "clients.md"
_BLOCK = re.compile(r"(?:^<!-- *((?:(?!-->).)*?)\s*-->\n)?^```(python|sh|diff)\n(.*?)^```$",
                    re.MULTILINE | re.DOTALL)
_OPTIONS = {"python": {"ranks", "notebook", "more", "not run"},
            "sh": {"run", "more", "parse", "not run"}, "diff": {"ranks", "more", "not run"}}
_FOLDERS = ("benchmarks", "examples", "slurm", "tests", "docs", "packaging", "mpiring")


@dataclass
class Example:
    """A program of one or several blocks, or shell commands."""

    place: str
    language: str
    options: dict[str, str | None]
    text: str
    shown: str = field(repr=False)

    def check(self, folder):
        """Run it as its comment says, in a separate folder."""
        if "parse" in self.options or "not run" in self.options:
            (check_words if self.language == "sh" else compiled)(self.text)
            return
        for module in self.options.get("needs", "").split():
            installed(module)
        for name in _FOLDERS:
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        if self.language == "sh":
            ended = shell(self.text, cwd=folder)
        else:
            program = folder / "program.py"
            program.write_text(self.text)
            # A failure ends the job. Otherwise, ranks that stay run it, unless it wants others.
            start = launch if self.options.keys() & {"fails", "fresh"} else run
            ended = (shell("python program.py", cwd=folder) if "notebook" in self.options else
                     start(int(self.options["ranks"]), program, cwd=folder))
        assert (ended.status == 0) == ("fails" not in self.options), ended.output
        assert self.options.get("fails", "") in ended.output


def examples(page):
    """Return the examples of a page, in order."""
    blocks = []
    for number, match in enumerate(_BLOCK.finditer(page.read_text()), 1):
        comment, language, text = match.groups()
        place = f"{page.relative_to(ROOT)}:{number}"
        assert comment, f"{place}: a comment before the block says how it is run:\n{text}"
        first, _, code = comment.partition("\n")
        options = _parsed(first, place)
        how = options.keys() - {"needs", "fails"}
        assert len(how) == 1 and how <= _OPTIONS[language], f"{place}: {first}"
        if language == "diff":
            text = "".join(line[1:] for line in text.splitlines(True) if not line.startswith("-"))
        before, _, after = f"\n{code}\n".partition("\n---\n")
        program_text = f"{before}\n{_of_cell(text)}{after}\n"
        if "more" in options:
            program = next((each for each in blocks[::-1]
                            if {"ranks", "notebook"} & each.options.keys()), None)
            assert program, f"{place} continues no program"
            program.text += program_text
            program.shown += text
        else:
            blocks.append(Example(place, language, options, program_text, text))
    return blocks


def example(page, words):
    """Return the only example of a page that contains certain words."""
    block, = (each for each in examples(ROOT / page) if words in each.shown)
    return block


def parameters(pages):
    """Return the examples of pages, as parameters of a test."""
    return [pytest.param(each, id=each.place) for page in pages for each in examples(page)]


def compiled(text):
    """Check a program without running it."""
    compile(text, "program.py", "exec")


def check_words(text):
    """Check that commands have the options and files that they name."""
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " ; "), posix=True,
                        punctuation_chars=True)
    lexer.whitespace_split = True
    words = []
    for word in [*lexer, ";"]:
        if word and not set(word) <= set("();<>|&"):
            words.append(word)
            continue
        _check_command(words)
        words = []


def _check_command(words):
    for word in words:
        if word.split("/")[0] in _FOLDERS and "/" in word and "*" not in word:
            assert (ROOT / word.partition("::")[0]).exists(), word
    while "-m" in words:
        _, module, *words = words[words.index("-m"):]
        folder, _, name = module.partition(".")
        # parse_args ends the test if a word is no option.
        if module == "mpiring":
            words = getattr(parse(words), "command", None) or []
        elif folder == "benchmarks":
            benchmarks.parse(name, importlib.import_module(module).declare, words)


def _of_cell(text):
    """Return a block without the marks that only notebooks know: `%%writefile` and `!`."""
    if match := re.match(r"%%writefile (\S+)\n", text):
        written = text[match.end():]
        return f"__import__('pathlib').Path({match[1]!r}).write_text({written!r})\n"
    return re.sub("^!(.*)$", lambda line: f"__import__('subprocess').run({line[1]!r}, shell=True, "
                  "check=True)", text, flags=re.MULTILINE)


def _parsed(line, place):
    if line.startswith("not run"):
        assert re.fullmatch(r"not run: \S.+", line), f"{place}: give a reason: {line}"
        return {"not run": line.partition(": ")[2]}
    parts = dict(re.fullmatch(r"(\w+)(?:: (.*))?", part).groups() for part in line.split(", "))
    assert parts.keys() <= {"needs", "fails"}.union(*_OPTIONS.values()), f"{place}: {line}"
    return parts
