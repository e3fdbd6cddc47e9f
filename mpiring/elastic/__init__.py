"""Training that survives the death of ranks: survivors return to the last commit in memory."""

from ..provisional import publish
from .recovery import run
from .state import State

__all__ = ["State", "run"]

publish(__name__)
