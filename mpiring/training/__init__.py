"""Averages the gradients of training steps, and keeps replicas equal."""

from ..reducers.named import or_setting
from .fused import Fusion, Views
from .weighing import Weighing
