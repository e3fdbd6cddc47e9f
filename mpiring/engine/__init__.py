"""Runs operations: their order, their progress in the background, and their end."""
