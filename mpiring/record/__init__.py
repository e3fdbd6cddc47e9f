"""A rank's operations and their costs: the recorder, trace files, statistics."""
