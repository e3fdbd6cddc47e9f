"""Runs PyTorch's tests of torch.distributed that Gloo passes, with the back end of mpiring.

    pip install expecttest
    python tests/helpers/torch_suite.py                       # all tests
    python tests/helpers/torch_suite.py test_broadcast_group  # this test

The tests are in PyTorch's wheel: torch.testing._internal.distributed.distributed_test. Each test
runs on 3 ranks, with Gloo in separate processes and, if it passes, with mpiring in a separate job.
At first, tests are told that they run with Gloo, because they skip functions of unknown back ends.
The tests `monitored_barrier_gloo` are left out, because PyTorch refuses other back ends. Tests of a
barrier's timeout end before they destroy the broken group, which only Gloo can do without an error.
Run it by hand: it takes long, and depends on the version of PyTorch. The exit status is 1 if a test
failed.
"""

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from launching import launch

RANKS, LIMIT_S = 3, 240
ONLY_GLOO, BREAKING = "monitored_barrier_gloo", "test_barrier_timeout"
# These tests ask for the name of the back end, and create a model only for known back ends.
ASKING = "test_accumulate_gradients"
# As in PyTorch's own runner: some tests are meant to wait for it.
TIMEOUT_S, TIMEOUTS_S = 60, {"test_ddp_uneven_inputs": 300, "test_ddp_model_diff_across_ranks": 5,
                             "test_ddp_has_finalized": 5}


def tests_of_pytorch(folder):
    """Import PyTorch's tests, which read the environment at import."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "TEMP_DIR": str(folder),
                   "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file",
                   "GLOO_SOCKET_IFNAME": "lo"}
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def names_of(tests):
    """Return the names of the tests that can run."""
    base = tests.DistributedTest._DistTestBase
    return [name for name in dir(base) if name.startswith("test_") and ONLY_GLOO not in name
            and not getattr(getattr(base, name), "__unittest_skip__", False)]


def run_rank(tests, name, folder, rank=None):
    """Run one test as one rank, and write how it ended to the folder.

    Args:
        rank: Rank with Gloo; None with mpiring, which knows it.
    """
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    class Tests(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        pass

    timeout = timedelta(seconds=TIMEOUTS_S.get(name, TIMEOUT_S))
    if rank is None:
        import mpiring.torch  # noqa: F401 (registers the back end)
        if not name.startswith(ASKING):
            tests.BACKEND, tests.INIT_METHOD = "mpiring", "mpi://"
        dist.init_process_group("mpiring", init_method="mpi://", timeout=timeout)
    else:
        # Their output would be between the lines of the table.
        for standard in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), standard)
        os.environ["TEMP_DIR"] = str(folder)
        tests.INIT_METHOD = f"file://{folder}/init_dir/shared_init_file"
        dist.init_process_group("gloo", init_method=f"file://{folder}/first", rank=rank,
                                world_size=RANKS, timeout=timeout)
    test = Tests(name)
    test.rank, test.file_name = dist.get_rank(), f"{folder}/file"
    test._barrier()
    set_rng_seed()
    outcome = "passed"
    try:
        getattr(test, name)()
    except (unittest.SkipTest, SystemExit):
        outcome = "skipped"
    except BaseException:
        outcome = traceback.format_exc()
    (folder / f"outcome.{test.rank}").write_text(outcome)
    if outcome != "passed":
        # Other ranks may wait forever.
        os._exit(1)
    test._barrier()
    if name.startswith(BREAKING):
        os._exit(0)
    dist.destroy_process_group()


def new_folder():
    """Return a folder as PyTorch's tests expect it."""
    folder = Path(tempfile.mkdtemp(prefix="torch_suite_"))
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir()
    return folder


def outcome_in(folder, ended_well, output=""):
    """Return the outcome over all ranks: "passed", "skipped", or an error; remove the folder."""
    notes = [path.read_text() for path in sorted(folder.glob("outcome.*"))]
    shutil.rmtree(folder, ignore_errors=True)
    errors = [note for note in notes if note not in ("passed", "skipped")]
    if errors or "skipped" in notes:
        return errors[0] if errors else "skipped"
    if len(notes) == RANKS and ended_well:
        return "passed"
    return f"{output}\n{len(notes)} of {RANKS} ranks passed, but the processes did not end well"


def over_gloo(tests, name):
    """Return the outcome of a test with Gloo, in forked processes that do not import PyTorch."""
    folder, fork = new_folder(), multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(tests, name, folder, rank))
             for rank in range(RANKS)]
    deadline = time.monotonic() + LIMIT_S
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(0, deadline - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    return outcome_in(folder, not any(process.exitcode for process in ranks))


def over_mpiring(name):
    """Return the outcome of a test with mpiring, in a separate job."""
    folder = new_folder()
    try:
        ended = launch(RANKS, __file__, "--rank", folder, name, timeout_s=LIMIT_S)
    except pytest.fail.Exception as late:
        return f"{outcome_in(folder, False)}\n{late}"
    # These tests end without MPI_Finalize, which a launcher may report as a death; all ranks must
    # have noted that they passed.
    ended_well = ended.status == 0 or name.startswith(BREAKING)
    return outcome_in(folder, ended_well, ended.output)


def main():
    """Read the command line; run the tests, or be one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="tests to run; all by default")
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(tests_of_pytorch(arguments.rank), *arguments.names, arguments.rank)
        return 0
    tests = tests_of_pytorch("/nowhere")
    failures, counts = {}, Counter()
    for name in arguments.names or names_of(tests):
        outcome = over_gloo(tests, name)
        if outcome != "passed":
            verdict = "skipped by Gloo" if outcome == "skipped" else "failed by Gloo"
            counts[verdict] += 1
            print(f"{verdict}  {name}", flush=True)
            continue
        began = time.monotonic()
        outcome = over_mpiring(name)
        if outcome != "passed":
            failures[name] = outcome
        verdict = "FAILED" if name in failures else "passed"
        counts[verdict] += 1
        print(f"{verdict}  {time.monotonic() - began:6.1f} s  {name}", flush=True)
    for name, text in failures.items():
        print(f"\n{name}:\n{text[-5000:]}")
    print(*(f"{count} {verdict}" for verdict, count in counts.items()), sep=", ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
