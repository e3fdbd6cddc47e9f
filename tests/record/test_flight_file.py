"""Tests that PyTorch's fr_trace names the rank that differs in flight records of real jobs."""

import re

import pytest
from launching import PROGRAMS, ROOT, installed, launch, needed, python
from pages import example

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]
PAGE, FR_TRACE = "docs/how_to/hang.md", "torch.distributed.flight_recorder.fr_trace"


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    installed("torch")
    folder = tmp_path_factory.mktemp("differing")
    ended = launch(3, PROGRAMS / "differing_flights.py", folder)
    assert ended.status == 0, ended.output
    return folder


@pytest.mark.parametrize(("case", "problem"), [
    ("shape", "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH"),
    ("op", "Culprit rank 1; Error type: COLLECTIVE_DTYPE_MISMATCH"),
    ("call", "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH"),
    ("group", "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH"),
    ("torch", "missing ranks: {1}")])
def test_fr_trace_names_the_rank_whose_call_differs(differing, case, problem, caplog):
    needed(FR_TRACE).main([str(differing / case)])
    assert problem in caplog.text
    assert caplog.text.count("sequence number") == 1, f"nothing else differs: {caplog.text}"


def test_a_stall_saves_the_records_of_all_ranks(tmp_path):
    """As on the page, whose lines fr_trace prints."""
    installed("torch")
    hanging, program = example(PAGE, "loaded.get()"), tmp_path / "program.py"
    program.write_text(hanging.text)
    ended = launch(3, program, MPIRING_TRACE=tmp_path / "flight")
    assert ended.status != 0 and "StallError" in ended.output
    (shown,) = re.findall(r"^Not all ranks joining.*?(?=^```)", (ROOT / PAGE).read_text(),
                          re.MULTILINE | re.DOTALL)
    said = python("-m", FR_TRACE, tmp_path / "flight")
    assert said.returncode == 0 and set(shown.splitlines()) <= set(said.stderr.splitlines()), (
        said.stderr)
