"""Kills ranks of training jobs at random times, and counts how many jobs resume, and how soon.

    python tests/helpers/elastic_campaign.py --kills 100
    python tests/helpers/elastic_campaign.py --kills 30 --grow

With --grow, new ranks replace dead ranks. It needs an Open MPI whose mpirun has
`--with-ft ulfm`. Run it by hand: it takes a few minutes.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from launching import PROGRAMS, start

PLACES = ["compute", "commit", "barrier", "objects", "broadcast", "broadcast window", "allgather",
          "reduce_scatter", "reduce_scatter window", "allreduce shared",
          "allreduce shared window", "allreduce ring", "allreduce direct", "allreduce native",
          "allreduce auto window", "iallreduce ring", "iallreduce native", "iallreduce shared"]
PATTERNS = ["one", "one", "one", "rank 0", "two at once", "one after another", "in recovery"]
RANKS, STEPS, LIMIT_S = 4, 400, 220
SURVIVES = ("--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1")


def events(folder):
    """Return the events that ranks have written: (seconds, rank, "begins" or "goes on", count)."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    for line in lines:
        when, rank, *words = line.split()
        if words[-1].isdigit():
            yield float(when), int(rank), " ".join(words[:-2]), int(words[-1])


def wait_until_all_go_on(folder, size, job, since=0.0):
    """Wait until so many ranks have made a step together; return False if the job ends earlier."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.poll() is None:
        steps = [event for at, _, event, among in events(folder) if among == size and at > since]
        if steps.count("goes on") >= size:
            return True
        time.sleep(0.005)
    return False


def kill(folder, ranks):
    """Kill some ranks, and return the time."""
    for rank in ranks:
        os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)
    return time.time()


def injure(folder, job, pattern, rng, grow):
    """Kill ranks in a pattern; return, for each kill, the time and the number of killed ranks."""
    victims = rng.sample(range(RANKS), 2)
    if pattern == "rank 0":
        victims = [0]
    elif pattern == "one":
        del victims[1:]
    if not wait_until_all_go_on(folder, RANKS, job):
        return []
    time.sleep(rng.uniform(0, 0.8))
    if pattern == "two at once":
        return [(kill(folder, victims), 2)]
    first = kill(folder, victims[:1]), 1
    if pattern == "in recovery":
        time.sleep(rng.uniform(0, 0.2))
        return [(kill(folder, victims[1:]), 2)]
    if pattern == "one after another":
        left = RANKS if grow else RANKS - 1
        if not wait_until_all_go_on(folder, left, job, first[0]):
            return [first]
        time.sleep(rng.uniform(0, 0.3))
        return [first, (kill(folder, victims[1:]), 2)]
    return [first]


def one_job(place, private, pattern, rng, grow):
    """Run a job, and kill ranks of it.

    Returns:
        The number of killed ranks; an error, or ""; the seconds from each death, or two deaths at
        once, to the first later step of the last rank; the output of the job.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, problem = Path(name), ""
        job = start(RANKS, PROGRAMS / "elastic_training.py", folder, STEPS, place, "",
                    *[RANKS] * grow, options=SURVIVES,
                    MPIRING_SHARED_MEMORY=str(int(not private)))
        try:
            deaths = injure(folder, job, pattern, rng, grow)
        except ProcessLookupError:
            deaths = []    # The job had ended before.
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            problem = "hangs"
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
        if job.returncode and (folder / "log").exists():
            output += (folder / "log").read_text()[-2000:]
        killed, recovery_s = deaths[-1][1] if deaths else 0, []
        for when, gone in deaths:
            size = RANKS if grow else RANKS - gone
            steps = sorted(at for at, _, event, among in events(folder)
                           if event == "goes on" and among == size and at > when)
            recovery_s += [steps[size - 1] - when] if len(steps) >= size else []
    left, right = RANKS if grow else RANKS - killed, output.count("right ")
    if "WRONG" in output:
        problem = "a wrong sum"
    elif not problem and job.returncode:
        problem = f"ends with status {job.returncode}"
    elif not problem and right != left:
        problem = f"{right} of {left} ranks are right"
    return killed, problem, recovery_s, output


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grow", action="store_true", help="let new ranks replace the dead ones")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    kills = jobs = survived = 0
    problems, recovery_s = Counter(), []
    while kills < args.kills:
        place, pattern = PLACES[jobs % len(PLACES)], rng.choice(PATTERNS)
        private = rng.random() < 0.3 and "shared" not in place
        killed, problem, its_s, output = one_job(place, private, pattern, rng,
                                                 args.grow)
        jobs += 1
        kills += killed
        survived += killed * (not problem)
        recovery_s += its_s
        print(f"{kills:4} {place}{' without shared memory' * private}, {pattern}: "
              f"{problem or 'goes on'} {[round(s, 2) for s in its_s]}", flush=True)
        if problem:
            problems[problem] += 1
            print(output[-6000:], flush=True)
    print(json.dumps({"jobs": jobs, "kills": kills, "survived": survived, "problems": problems,
                      "median_s": statistics.median(recovery_s), "longest_s": max(recovery_s)}))


if __name__ == "__main__":
    main()
