"""Kills trainings at random moments, resumes on other numbers of ranks, and counts every sample.

    python tests/helpers/data_campaign.py --kills 20

Run it by hand: it takes a few minutes, and needs torchdata for one of the sources.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from launching import PROGRAMS, finish, start

# torchdata's loader has a separate state, which the other sources cannot load.
SOURCES = [["plain", "prefetch", "workers", "workers, prefetch"], ["torchdata, prefetch"]]
LIMIT_S = 110


def steps(folder):
    """Return the number of steps of all jobs together."""
    log = folder / "log"
    return log.read_text().count("\n") if log.exists() else 0


def killed(job, folder, ranks, after, rng):
    """Kill one rank of a job, or all, after a number of steps; return False if it ends earlier."""
    deadline, before = time.monotonic() + LIMIT_S, steps(folder)
    while steps(folder) < before + after:
        if job.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.01))
    victims = range(ranks) if rng.random() < 0.5 else [rng.randrange(ranks)]
    try:
        for rank in victims:
            os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)
    except ProcessLookupError:
        return False    # The job has just ended.
    return True


def one_training(folder, jobs, rng):
    """Run jobs in turn, and kill all but the last; return the kills, and how the last job ended.

    Args:
        jobs: Ranks, source, tokens per batch, and steps between checkpoints.
    """
    for kills, (ranks, *options) in enumerate(jobs):
        print(f"{ranks} ranks, {', '.join(map(str, options))}", flush=True)
        job = start(ranks, PROGRAMS / "data_training.py", folder, *options)
        last = kills == len(jobs) - 1
        dying = not last and killed(job, folder, ranks, rng.randint(1, 60), rng)
        ended = finish(job, LIMIT_S)
        if not dying:
            return kills, ended


def main():
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, kills, trainings, exact = random.Random(args.seed), 0, 0, 0
    while kills < args.kills:
        sources = SOURCES[trainings % 3 == 2]
        with tempfile.TemporaryDirectory() as name:
            wanted = min(rng.randint(1, 4), args.kills - kills)
            jobs = [(rng.randint(1, 3), rng.choice(sources), rng.choice([4000, 4000, 9000]),
                     rng.randint(1, 6)) for _ in range(wanted + 1)]
            done, ended = one_training(Path(name), jobs, rng)
        kills, trainings = kills + done, trainings + 1
        right = ended.status == 0 and "once" in ended.output
        exact += done * right
        print(f"{done} kills, {ended.output[-3000:].strip()}", flush=True)
    print(f"{exact} of {kills} kills, in {trainings} trainings, lost and repeated no sample")
    raise SystemExit(exact < kills)


if __name__ == "__main__":
    main()
