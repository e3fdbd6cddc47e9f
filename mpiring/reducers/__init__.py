"""Reducers: plain means of gradients, means with compressed messages between nodes, and Adasum."""

from ..names import publish
from .adasum import Adasum
from .compressor import Compressor, ErrorFeedback
from .encoded import Cast, Int8, OneBit
from .powersgd import PowerSGD
from .reducer import Mean, Reducer
from .topk import TopK

__all__ = ["Adasum", "Cast", "Compressor", "ErrorFeedback", "Int8", "Mean", "OneBit", "PowerSGD",
           "Reducer", "TopK"]

publish(__name__)
