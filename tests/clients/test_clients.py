"""Runs frameworks that users bring over the back end: `python -m pytest tests/clients`.

Their wheels are the group `clients`.
"""

import dataclasses

import pages
import pytest
from launching import PROGRAMS, installed, launch

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]


@pytest.mark.parametrize(("client", "package", "ranks"), [
    ("trainer", "transformers", 2), ("accelerate", "accelerate", 2), ("lightning", "lightning", 2),
    ("deepspeed", "deepspeed", 2), ("deepspeed", "deepspeed", 3)])
def test_a_client_does_what_it_does_over_gloo(client, package, ranks, tmp_path):
    """Bitwise on two ranks, where a sum has one order."""
    installed(package)
    ended = launch(ranks, PROGRAMS / "torch_clients.py", client, tmp_path)
    assert ended.status == 0, ended.output
    assert ended.output.count(f"{client} does over mpiring what it does over Gloo") == ranks


@pytest.mark.parametrize("example", pages.parameters([pages.CLIENTS]))
@pytest.mark.parametrize("backend", ["mpiring", "gloo"])
def test_what_users_write(example, backend, tmp_path):
    text = example.text.replace('"mpiring"', f'"{backend}"')
    # DeepSpeed keeps the groups of an earlier program in the same process.
    options = example.options if backend == "mpiring" else {**example.options, "fresh": None}
    dataclasses.replace(example, text=text, options=options).check(tmp_path)
