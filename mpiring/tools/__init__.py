"""The commands of `python -m mpiring`, one folder each, and what they share."""
