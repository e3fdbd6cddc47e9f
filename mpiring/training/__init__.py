"""Averages the gradients of training steps, and keeps replicas equal."""

from .fused import Fusion, Views
from .weighing import Weighing
