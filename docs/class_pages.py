"""Gives each class of the reference a page: the pages of reference/api say `.. autoclass::`.

On the site, a table of classes replaces these directives. Each row links to a page that is written
before Sphinx reads any, with the directive and the members that it lists.
"""

import re
from pathlib import Path

API = "reference/api"
_CLASS = r"\.\. autoclass:: ([\w.]+)(?:\(\))?\n(?: {3}\S.*\n)*"
_CLASSES = re.compile(rf"(?:^{_CLASS}\n?)+", re.MULTILINE)


def write_pages(app):
    """Write the page of each class, and delete pages of classes that are gone."""
    folder = Path(app.srcdir, API, "classes")
    folder.mkdir(exist_ok=True)
    texts = {}
    for page in Path(app.srcdir, API).glob("*.md"):
        for match in re.finditer(_CLASS, page.read_text()):
            texts[f"{match[1]}.rst"] = f"{match[1]}\n{'=' * len(match[1])}\n\n{match[0]}"
    for page in folder.iterdir():
        if page.name not in texts:
            page.unlink()
    for name, text in texts.items():
        # Sphinx reads a page again if its time has changed.
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


def link_pages(app, page, source):
    """Replace the directives of a page by a table of links."""
    def table(match):
        names = re.findall(_CLASS, match[0])
        rows = "".join(f"   ~{name}\n" for name in names)
        pages = "".join(f"   {name.rpartition('.')[2]} <classes/{name}>\n" for name in names)
        return (f".. autosummary::\n   :nosignatures:\n\n{rows}\n"
                f".. toctree::\n   :hidden:\n\n{pages}\n")

    if Path(page).parent == Path(API):
        source[0] = _CLASSES.sub(table, source[0])
