"""Lists sentences of pages and modules that break the rules for English in docs/styles.

`python tests/helpers/english.py [PATH ...]` prints file, line, rule, remedy, and their number. The
rules are files of Vale (https://vale.sh), which reads pages only; this also reads docstrings,
the help of options, and the comments of modules, batch scripts, recipes and programs on pages.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
STYLES = ROOT / "docs" / "styles" / "mpiring"
# "On the host: …" explains a value; "Number of …" names it.
_ENTRY = re.compile(r"(?i)(?:about|after|as|at|before|between|beyond|by|for|from|how|in|of|on|over"
                    r"|per|that|to|under|what|when|where|whether|which|who|whose|with|without)\b")
# A flag may say what to do, "print the findings as JSON", but an option with a value names it.
_OPTION = re.compile(rf"{_ENTRY.pattern}|(?:append|draw|print|run|save|show|sleep|stop|used|write"
                     r"|written)\b|[-\w]+:")
# A comment, but not "#!", "#:", "# noqa" and "# type:". The words of an indented one are a program.
_COMMENT = re.compile(r"(?:^|(?<=\s))#(?:$| (?! {2}|noqa|type:)(.*))")


class Text(NamedTuple):
    """A paragraph, a heading, a cell of a table or an entry, without code and links."""

    line: int
    scope: str
    text: str


class Rule:
    """One file of docs/styles; `breaks` finds its violations in a text."""

    def __init__(self, path):
        rule = yaml.safe_load(path.read_text())
        self.name, self.scope, self.message = path.stem, rule.get("scope", "text"), rule["message"]
        self.most = rule.get("max")
        swap = rule.get("swap") or dict.fromkeys(rule.get("tokens") or [rule["token"]])
        form = r"\b(?:{})\b" if "swap" in rule else "{}"
        flags = re.IGNORECASE if rule.get("ignorecase") else 0
        self.remedies = [(re.compile(form.format(pattern), flags), remedy)
                         for pattern, remedy in swap.items()]
        # A single search finds that most sentences break no rule.
        self.any = re.compile(form.format("|".join(f"(?:{pattern})" for pattern in swap)), flags)

    def breaks(self, text):
        """Yield the remedy for each violation of the rule in a Text."""
        if (self.scope == "heading") != (text.scope == "heading") and self.scope != "text":
            return
        if self.scope == "sentence" and text.scope == "cell":
            return
        for part in sentences(text.text) if self.scope == "sentence" else [text.text]:
            for pattern, remedy in self.remedies if self.any.search(part) else ():
                hits = [hit.group() for hit in pattern.finditer(part)]
                if self.most is None:
                    for hit in hits:
                        yield self.message % ((remedy, hit) if remedy else hit.strip())
                elif len(hits) > self.most:
                    yield f"{self.message} {part[:60]} …"


def rules():
    """Return all rules."""
    return [Rule(path) for path in sorted(STYLES.glob("*.yml"))]


def sentences(text):
    """Split a paragraph."""
    return re.split(r"(?<=[.?!])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9]|\*+\w|mpiring\b)", text)


def plain(text):
    """Return text without marks: code is one word, a link is its text."""
    text = re.sub(r"(`+)(.+?)\1", "CODE", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(text.split())


def of_page(text):
    """Yield the Texts of a page in Markdown."""
    def blank(match):
        return "\n" * match.group().count("\n")

    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    program = re.compile(r"^( *)(`{3,})(.*?)^ *\2", re.MULTILINE | re.DOTALL)
    for hit in program.finditer(text):
        if not hit[3].startswith("text"):
            yield from of_comments(hit[3], 1 + text[:hit.start()].count("\n"))
    text = program.sub(blank, text)
    text = re.sub(r"^:{3,}.*$|^:\w[\w-]*:.*$|^\(\S+\)=$|^\+\+\+$", "", text, flags=re.MULTILINE)
    # A rule of a table, a list's mark, a quotation and a definition each begin a new text.
    blocks = re.split(r"(\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.|>|:) )|\n(?=\|)|\n(?=#)|(?<=\|)\n)", text)
    line = 1
    for block in blocks:
        bare = block.strip()
        if bare.startswith("#"):
            yield Text(line, "heading", plain(bare.lstrip("# ")))
        elif bare.startswith("|"):
            for cell in bare.replace(r"\|", "/").strip("|").split("|"):
                yield Text(line, "cell", plain(cell))
        elif bare:
            yield Text(line, "text", plain(re.sub(r"^(?:[-*+]|\d+\.|>|:) +", "", bare)))
        line += block.count("\n")


def of_docstring(text, line):
    """Yield the Texts of a docstring; programs in it are indented, with an empty line before."""
    section = None
    for block in re.split(r"\n[ \t]*\n", text):
        lines = block.splitlines()
        if lines and re.fullmatch(r"(?:Args|Attributes|Raises|Returns|Yields|Note|Example)s?:",
                                  lines[0].strip()):
            section, lines = lines[0].strip(), lines[1:]
        elif re.match(r"\s*(?:    |>>>|(?:python|mpirun|mpiexec|srun) )", block):
            lines = []
        depth = min((len(row) - len(row.lstrip()) for row in lines if row.strip()), default=0)
        entry = ""
        for row in [*lines, None]:
            starts = row is None or section in {"Args:", "Attributes:", "Raises:"} \
                and len(row) - len(row.lstrip()) == depth
            if starts and entry:
                name, colon, rest = entry.partition(": ")
                if section and colon and re.fullmatch(r"[\w`*,. /]+", name):
                    yield Text(line, "entry" if section == "Args:" else "text", plain(rest))
                else:
                    yield Text(line, "text", plain(entry))
                entry = ""
            entry += f" {(row or '').strip()}"
            entry = entry.strip()


def of_module(text):
    """Yield the Texts of a module: docstrings, comments, help."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node, clean=False):
                first = node.body[0]
                yield from of_docstring(re.sub(f"(?m)^ {{{first.col_offset}}}", "", docstring),
                                        first.lineno)
        given = {keyword.arg: keyword.value for keyword in getattr(node, "keywords", ())}
        for name in given.keys() & {"help", "description"}:
            words = [part.value for part in sorted(
                (part for part in ast.walk(given[name]) if isinstance(part, ast.Constant)
                 and isinstance(part.value, str)), key=lambda part: (part.lineno, part.col_offset))]
            valued = getattr(node.func, "attr", "") == "add_argument" and "action" not in given
            scope = "text" if name == "description" else "option" if valued else "entry"
            yield Text(given[name].lineno, scope, plain("".join(words)))
    yield from of_comments(text)


def of_comments(text, line=1):
    """Yield the Texts of comments; lines that hold nothing else continue a comment."""
    words, start = [], line
    for number, row in enumerate([*text.splitlines(), ""], line):
        hit = _COMMENT.search(row)
        said = hit[1] if hit else None
        if words and not (said and not row[:hit.start()].strip()):
            yield Text(start, "text", plain(" ".join(words)))
            words = []
        if said:
            start = start if words else number
            words.append(said)


def breaks(path, checked=None):
    """Yield line, rule and remedy of each violation in a file."""
    read = {".md": of_page, ".py": of_module}.get(path.suffix, of_comments)
    for part in read(path.read_text()):
        for rule in checked or rules():
            for remedy in rule.breaks(part):
                yield part.line, rule.name, remedy
        begins = {"entry": _ENTRY, "option": _OPTION}.get(part.scope)
        if begins and (hit := begins.match(part.text)):
            yield part.line, "Entries", f"Begin with a noun, or 'If true,', not '{hit.group()}'."


def files(paths):
    """Return the files under some paths; by default, all that the rules apply to."""
    paths = paths or [ROOT / name for name in (
        "mpiring", "benchmarks", "examples", "docs", "slurm", "packaging", ".ci", "README.md",
        "CONTRIBUTING.md", "CHANGELOG.md", "setup.cfg", "pyproject.toml")]
    return sorted(path for top in paths
                  for path in ([top] if top.is_file() else top.rglob("*"))
                  if path.suffix in {".md", ".py", ".sbatch", ".yaml", ".def", ".cfg", ".toml"}
                  or path.name in {"Dockerfile", "run"})


def main(names):
    """Print all violations; return the number of files with violations."""
    counts, checked = Counter(), rules()
    for path in files([Path(name) for name in names]):
        for line, name, remedy in breaks(path, checked):
            print(f"{path}:{line}: {name}: {remedy}")
            counts[name] += 1
    print(f"{sum(counts.values())} breaks:", ", ".join(
        f"{name} {count}" for name, count in counts.most_common()), file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
