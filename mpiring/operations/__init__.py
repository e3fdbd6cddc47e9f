"""Operations made of collectives: agreement before data, choice of algorithm, memory to use."""

from .algorithms import NAMES, Case, candidates, choose, named
from .model import Curve, Model
from .resources import alone
