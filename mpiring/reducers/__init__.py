"""How gradients become their mean: plainly, or with less to send between nodes."""

from .cast import Cast
from .compressor import Compressor
from .feedback import ErrorFeedback
from .int8 import Int8
from .onebit import OneBit
from .powersgd import PowerSGD
from .reducer import Mean, Reducer
from .topk import TopK

__all__ = ["Cast", "Compressor", "ErrorFeedback", "Int8", "Mean", "OneBit", "PowerSGD", "Reducer",
           "TopK"]
