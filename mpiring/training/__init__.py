"""Averages what a training step computes, and keeps replicas equal."""
