"""Averages the gradients of training steps, and keeps replicas equal."""
