"""Joins the traces of ranks, and reports on them: `python -m mpiring trace`."""
