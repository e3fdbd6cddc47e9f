"""Keeps training right where machines fail: replicas that differ are found."""
