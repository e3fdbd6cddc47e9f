"""Merges the traces of all ranks, and reports on them: `python -m mpiring trace`."""
