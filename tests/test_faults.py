"""Breaks jobs in every way, and checks that each ends soon, and says why."""

import itertools
import os
import pickle
import re
import signal
import time
from pathlib import Path

import contract
import pytest
from launching import PROGRAMS, SOON_S, finish, installed, launch, start

pytestmark = pytest.mark.launch

IMPATIENT = {"MPIRING_STALL_WARNING_S": "1", "MPIRING_STALL_TIMEOUT_S": "3"}
FAULT = PROGRAMS / "fault.py"


def broken(ranks, *command, **variables):
    """Return what a job prints that must end soon, with an error."""
    ended = launch(ranks, *command, **IMPATIENT, **variables)
    assert ended.status != 0 and ended.seconds < SOON_S, ended.output
    return ended.output


# Those that a thread finds, or that end in different ways; tests/mpi/test_different_calls.py has
# what else may differ.
@pytest.mark.parametrize(("fault", "texts"), [
    ("shape", ["called allreduce sum of float32 (999,)", "float32 (1000,)"]),
    ("leaves early", ["called close", "called allreduce"]),
    *(pytest.param(*case, marks=pytest.mark.any_mpi) for case in [
        ("background", ["sum of float32 (999999,)", "sum of float32 (1000000,)"]),
        ("leaves a server", ["called finish a ParameterServer", "called close"]),
        ("leaves pairs", ["called agree in pair averaging", "called close"])])])
def test_ranks_that_disagree(fault, texts):
    output = broken(2, FAULT, fault)
    assert "BufferMismatchError: rank" in output
    for text in texts:
        assert text in output, output
    # Of one rank; of a second one if the first was held up just then.
    assert 1 <= output.count("Traceback (most recent call last)") <= 2, output


@pytest.mark.parametrize(("fault", "texts"), [
    ("raise", ["ValueError: a bug in the user's code", "rank 1 of 2 on", "failed with ValueError",
               "the other ranks:\n  the last operations of rank 0, by its clock:\n"]),
    ("raise beside a stopped rank", [
        "failed with ValueError", "the other ranks:\n  rank 0: no answer within 1 s"]),
    # An exception that cannot be printed.
    ("full", []),
    # The other one closes.
    ("stopped", ["rank 0 has waited", "#1 close", "StallError: rank 0: Timed out after",
                 "rank 1 does not answer"])])
def test_a_rank_that_fails_alone(fault, texts):
    output = broken(2, FAULT, fault)
    for text in texts:
        assert text in output, output


@pytest.mark.any_mpi
def test_a_missing_call():
    """Of the mean of a bucket of gradients, which is named."""
    report, _, error = broken(3, FAULT, "missing call").partition("StallError")
    for text in (report, error):
        assert re.search(r"#\d+ reduce Mean.* of float64 .* step 0 bucket 0 \(b2, w2, b1\)", text)
        assert re.search(r"rank 2 has NOT CALLED it; its last call was #\d+ \w+", text)
        assert re.search("rank [01] waits in it too", text)
        # The error is that of the first rank to raise it.
        assert re.search("the last operations of rank [01], by its clock:", text)
        assert "NOT COMPLETE" in text
        assert "the last operations of rank 2, by its clock:" in text
    # Of the lowest rank alone (tests/engine/test_stalls.py), unless that is a second late.
    reporters = re.findall(r"mpiring: rank (\d) has waited \d+ s", report)
    assert sorted(set(reporters)) == sorted(reporters) != [], "a rank reports once"


# What the two others say of the last of three ranks.
@pytest.mark.any_mpi
@pytest.mark.parametrize(("fault", "of_server"), [
    ("killed", "no weights from rank 2"),
    ("stopped", "rank 2 is behind: it has pushed 3 times, and staleness=0 wants 4")])
def test_a_rank_that_breaks_where_nobody_takes_steps_in_common(tmp_path, fault, of_server):
    output = broken(3, PROGRAMS / "loose_fault.py", fault, tmp_path)
    lines = re.findall(r"^(\w+), rank ([01]), after ([\d.]+) s: (.*)$", output, re.M)
    for way, text, whoever in [
            ("server", of_server, all), ("server", "rank 2 does not answer", all),
            # Of two that wait for each other, one waits for the last rank.
            ("pairs", "exchange with rank 2 in round", any),
            ("pairs", "rank 2 does not answer", any),
            ("diloco", "in inner step 4 (every=4, fragment 0, ", all),
            ("diloco", "rank 2 does not answer", all)]:
        errors = [error for its, _, _, error in lines if its == way]
        assert errors and whoever(text in error for error in errors), output
    assert all(float(took_s) < 3 + SOON_S for _, _, took_s, _ in lines)


# Without machine code Python takes the same steps; how MPI ends a job, it does not know.
@pytest.mark.parametrize(("fault", "text", "compiled"), [
    ("killed", "", 1), ("interrupt", "KeyboardInterrupt", 1),
    *(pytest.param(*case, marks=pytest.mark.any_mpi) for case in [
        ("killed in place", "", 0), ("interrupt in place", "KeyboardInterrupt", 1)])])
def test_a_rank_that_is_ended_amid_short_calls(fault, text, compiled, machine_code):
    output = broken(2, FAULT, fault, MPIRING_MACHINE_CODE=str(compiled))
    # The others may be ended before their lines come through.
    assert f"rank 1 is ready{', compiled' * compiled}\n" in output, output
    assert text in output, output


# Each way to open a group, and each way to fail; with --full all of both.
WAYS = ("init", "again", "part", "back end", "new group", "horovod", "process set", "beside")
FAULTS = ("exception", "mismatch", "caught", "stall", "exit", "thread", "killed", "terminated")
# Under Open MPI also.
ANY_GROUP = [("back end", "exception"), ("again", "stall"), ("horovod", "exception")]
REPORTED = [*ANY_GROUP, *(pytest.param(*case, marks=pytest.mark.any_mpi) for case in (
    itertools.product(WAYS, FAULTS) if contract.full else [
        *((way, "exception") for way in WAYS), ("back end", "mismatch"), ("beside", "caught"),
        ("part", "exit"), ("init", "thread"), ("again", "killed"), ("back end", "terminated")])
    if case not in ANY_GROUP)]
REPORT = re.compile(r"^( *)the last operations of rank (\d)[^,]*, by its clock \(more in (\S+)\):\n"
                    r"((?:\1  .*\n)+)", re.MULTILINE)


@pytest.mark.parametrize(("way", "fault"), REPORTED)
def test_the_report_is_of_the_group_that_fails(tmp_path, way, fault):
    """Whichever group this process has opened before; both ranks are named, and have records."""
    if way in ("back end", "new group"):
        installed("torch")
    ranks = 3 if way == "process set" else 2
    output = broken(ranks, PROGRAMS / "reported.py", way, fault, MPIRING_TRACE=str(tmp_path))
    reports = REPORT.findall(output)
    if fault not in ("killed", "terminated"):
        assert {"0", "1"} <= {rank for _, rank, _, _ in reports}, output
    # The rank that fails reports first. The last operations of the other one may be later ones.
    assert not reports or any(
        "float32 (77,)" in text for _, rank, _, text in reports if rank == reports[0][1]), output
    # The third rank waits elsewhere.
    for rank in {report[1] for report in reports} - {"2"}:
        entries = [entry for report in reports if report[1] == rank
                   for entry in pickle.loads(Path(report[2]).read_bytes())["entries"]]
        assert any("float32 (77,)" in entry["input_dtypes"][0] for entry in entries), output


@pytest.mark.parametrize("to", ["mpiexec", "all"])
def test_control_c(to):
    """A terminal sends SIGINT to the whole group; a script may send it to mpiexec alone."""
    job = start(2, FAULT, "wait for ever")
    ready = 0
    while ready < 2:
        line = job.stdout.readline()
        assert line, "the job ended before all ranks were ready"
        ready += line.count("is ready")
    time.sleep(0.5)
    began = time.monotonic()
    if to == "all":
        os.killpg(job.pid, signal.SIGINT)
    else:
        job.send_signal(signal.SIGINT)
    ended = finish(job)
    assert ended.status != 0 and time.monotonic() - began < SOON_S


@pytest.mark.any_mpi
def test_a_replica_that_differs_ends_the_job():
    output = broken(3, FAULT, "drift", MPIRING_DIGEST_STEPS="3")
    assert re.search(r"ReplicaError: rank \d: after 3 steps, rank 2 on \S+ differs from ranks "
                     r"0, 1 in w\. One tensor alone: look at that host's memory", output)
