"""Breaks jobs in every way, and checks that each ends soon, and says why."""

import os
import re
import signal
import time

import pytest
from launching import PROGRAMS, SOON_S, finish, launch, start

pytestmark = pytest.mark.launch

IMPATIENT = {"MPIRING_STALL_WARNING_S": "1", "MPIRING_STALL_TIMEOUT_S": "3"}
FAULT = PROGRAMS / "fault.py"

# Those that a thread finds, or that end in different ways; tests/mpi/test_different_calls.py has
# what else may differ.
MISMATCHES = {
    "shape": ["called allreduce sum of float32 (999,)", "float32 (1000,)"],
    "leaves early": ["called close", "called allreduce"],
    "background": ["sum of float32 (999999,)", "sum of float32 (1000000,)"],
    "leaves a server": ["called finish a ParameterServer", "called close"],
    "leaves pairs": ["called agree in pair averaging", "called close"],
}


@pytest.mark.parametrize("fault", [
    fault if fault in ("shape", "leaves early") else pytest.param(fault, marks=pytest.mark.any_mpi)
    for fault in MISMATCHES])
def test_ranks_that_disagree(fault):
    ended = launch(3 if fault == "shape" else 2, FAULT, fault, **IMPATIENT)
    assert ended.status != 0 and ended.seconds < SOON_S
    assert "BufferMismatchError: rank" in ended.output
    for text in MISMATCHES[fault]:
        assert text in ended.output, ended.output
    # Of one rank; of a second one if the first was held up just then.
    assert 1 <= ended.output.count("Traceback (most recent call last)") <= 2, ended.output


def test_an_exception_on_one_rank():
    ended = launch(3, FAULT, "raise", **IMPATIENT)
    assert ended.status != 0 and ended.seconds < SOON_S
    assert "ValueError: a bug in the user's code" in ended.output
    assert "rank 2 of 3 on" in ended.output and "failed with ValueError" in ended.output


@pytest.mark.any_mpi
def test_a_missing_call():
    ended = launch(4, FAULT, "missing call", **IMPATIENT)
    assert ended.status != 0 and ended.seconds < SOON_S
    report, _, error = ended.output.partition("StallError")
    for text in (report, error):
        assert "#1 allreduce sum of float32 (1000,), algorithm auto" in text
        assert "rank 3 has NOT CALLED it; its last call was #0 allreduce" in text
        assert re.search("rank [012] waits in it too", text)
        # The error is that of the first rank to raise it.
        assert re.search("the last operations of rank [012], by its clock:", text)
        assert "NOT COMPLETE" in text
        assert "the last operations of rank 3, by its clock:" in text
    reporters = re.findall(r"mpiring: rank (\d) has waited \d s", report)
    assert reporters == ["0"], "one report, of the lowest rank"


@pytest.mark.any_mpi
def test_a_rank_that_takes_no_steps_is_named():
    ended = launch(2, FAULT, "no steps", **IMPATIENT)
    assert ended.status != 0 and ended.seconds < SOON_S
    assert "Mean() of float32 (1008,) in inner step 4 (every=4, fragment 0, " in ended.output
    assert "rank 1 has NOT CALLED it" in ended.output


# What the two others say of the last of three ranks.
@pytest.mark.any_mpi
@pytest.mark.parametrize(("fault", "of_server"), [
    ("killed", "no weights from rank 2"),
    ("stopped", "rank 2 is behind: it has pushed 3 times, and staleness=0 wants 4")])
def test_a_rank_that_breaks_where_nobody_takes_steps_in_common(fault, of_server):
    ended = launch(3, PROGRAMS / "loose_fault.py", fault, **IMPATIENT)
    assert ended.status != 0 and ended.seconds < 3 * 3 + SOON_S
    found = re.findall(r"^(\w+), rank ([01]), after ([\d.]+) s: (.*)$", ended.output, re.M)
    for way, text, whoever in [
            ("server", of_server, all), ("server", "rank 2 does not answer", all),
            # Of two that wait for each other, one waits for the last rank.
            ("pairs", "exchange with rank 2 in round", any),
            ("pairs", "rank 2 does not answer", any),
            ("diloco", "in inner step 4 (every=4, fragment 0, ", all),
            ("diloco", "rank 2 does not answer", all)]:
        assert {way} <= {its for its, *_ in found}, ended.output
        assert whoever(text in error for its, _, _, error in found if its == way), ended.output
    assert all(float(took_s) < 3 + SOON_S for _, _, took_s, _ in found)


@pytest.mark.any_mpi
def test_a_missing_gradient_bucket_is_named():
    ended = launch(2, PROGRAMS / "missing_bucket.py", **IMPATIENT)
    assert ended.status != 0 and ended.seconds < SOON_S
    assert "bucket 0 (b2, w2, b1)" in ended.output, ended.output
    assert "rank 1 has NOT CALLED it" in ended.output


# Without machine code Python takes the same steps; how MPI ends a job, it does not know.
@pytest.mark.parametrize(("fault", "text", "compiled"), [
    ("killed", "", 1), ("interrupt", "KeyboardInterrupt", 1),
    *(pytest.param(*case, marks=pytest.mark.any_mpi) for case in [
        ("killed", "", 0),
        ("killed in place", "", 1), ("interrupt in place", "KeyboardInterrupt", 1)])])
def test_a_rank_that_is_ended_amid_short_calls(fault, text, compiled, machine_code):
    ended = launch(2, FAULT, fault, **IMPATIENT, MPIRING_MACHINE_CODE=str(compiled))
    assert ended.status != 0 and ended.seconds < SOON_S
    # The others may be ended before their lines come through.
    assert f"rank 1 is ready{', compiled' * compiled}\n" in ended.output, ended.output
    assert text in ended.output, ended.output


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


@pytest.mark.parametrize("progress", ["thread", "inline"])
def test_leaving_without_close_is_clean(progress):
    ended = launch(2, FAULT, "no close", MPIRING_PROGRESS=progress)
    assert ended.status == 0, ended.output
    assert ended.output.count("is ready") == 2
    assert "Error" not in ended.output


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_an_exception_that_cannot_be_printed(where):
    ended = launch(2, FAULT, f"full {where}")
    assert ended.status != 0 and ended.seconds < SOON_S


def test_a_stopped_rank_ends_the_job_of_those_who_close():
    ended = launch(2, FAULT, "stopped", **IMPATIENT)
    assert ended.status != 0 and ended.seconds < SOON_S, ended.output
    assert "rank 0 has waited" in ended.output and "#1 close" in ended.output
    assert "StallError: rank 0: Timed out after" in ended.output
    assert "rank 1 does not answer" in ended.output


@pytest.mark.any_mpi
def test_a_replica_that_differs_ends_the_job():
    ended = launch(3, FAULT, "drift", MPIRING_DIGEST_STEPS="3")
    assert ended.status != 0 and ended.seconds < SOON_S
    assert re.search(r"ReplicaError: rank \d: after 3 steps, rank 2 on \S+ differs from ranks "
                     r"0, 1 in w\. One tensor alone: look at that host's memory", ended.output)
