"""Joins the checkpoints of ranks, and reports on them: `python -m mpiring checkpoint`."""
