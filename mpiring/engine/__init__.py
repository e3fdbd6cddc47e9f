"""Runs operations: in which order, in the background, until they are complete or failed."""
