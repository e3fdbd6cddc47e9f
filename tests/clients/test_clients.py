"""Runs frameworks that users bring over the back end: `python -m pytest tests/clients`.

Their wheels are the group `clients`.
"""

import pages
import pytest
from launching import PROGRAMS, installed, launch

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]


@pytest.mark.parametrize(("client", "package"), [
    ("trainer", "transformers"), ("accelerate", "accelerate"), ("lightning", "lightning")])
def test_a_client_does_what_it_does_over_gloo(client, package, tmp_path):
    """Bit by bit: on two ranks there is one order in which to sum."""
    installed(package)
    ended = launch(2, PROGRAMS / "torch_clients.py", client, tmp_path)
    assert ended.status == 0, ended.output
    assert ended.output.count(f"{client} does over mpiring what it does over Gloo") == 2


@pytest.mark.parametrize("example", pages.parameters([pages.CLIENTS]))
def test_what_users_write(example, tmp_path):
    example.check(tmp_path)
