"""Simulates a cluster with slow links on one machine: `python -m mpiring lab`."""
