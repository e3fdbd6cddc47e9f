"""Updates the inventories: `python docs/inventories/update.py`, with a network.

An inventory tells Sphinx on which page another project documents a name. Those in this folder have
the names that mpiring's reference mentions, so that the site builds without a network. To add one,
write a line with its kind, and `?` as its page. A name that a project documents under another one
keeps its line.

`python docs/inventories/update.py python=FILE` reads a project's inventory from a file.
"""

import sys
import urllib.request
from pathlib import Path

from sphinx.util.inventory import InventoryFile

FOLDER = Path(__file__).parent
URLS = {"python": "https://docs.python.org/3", "numpy": "https://numpy.org/doc/stable",
        "mpi4py": "https://mpi4py.readthedocs.io/en/stable",
        "torch": "https://docs.pytorch.org/docs/stable"}


def updated(line, inventory):
    """Return the line of a name, with its page in a full inventory."""
    name, kind, page = line.split()
    item = inventory.get(f"py:{kind}", {}).get(name)
    return f"{name} {kind} {item.uri.partition('#')[0] if item else page}"


def main(files):
    for project, url in URLS.items():
        if project in files:
            full = Path(files[project]).read_bytes()
        else:
            with urllib.request.urlopen(f"{url}/objects.inv") as answer:
                full = answer.read()
        inventory = InventoryFile.loads(full, uri="").data
        path = FOLDER / f"{project}.txt"
        head, names = path.read_text().splitlines()[:3], path.read_text().splitlines()[3:]
        lines = sorted(updated(line, inventory) for line in names)
        path.write_text("\n".join([*head, *lines]) + "\n")
        print(*(f"{project}: no page for {line}" for line in lines if line.endswith("?")), sep="\n")


if __name__ == "__main__":
    main(dict(word.split("=") for word in sys.argv[1:]))
