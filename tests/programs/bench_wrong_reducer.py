"""Runs `python -m mpiring` with a Reducer that leaves other numbers on one rank than on others."""

import sys

from mpiring.__main__ import main
from mpiring.bench import reducers
from mpiring.reducers import Cast


class Wrong(Cast):
    """Turns the means around on rank 0."""

    def _reduce(self, collectives, bucket, kept):
        yield from super()._reduce(collectives, bucket, kept)
        if collectives.rank == 0:
            bucket.flat *= -1


reducers.METHODS["bf16"] = lambda warmup: Wrong("bfloat16")
sys.exit(main())
