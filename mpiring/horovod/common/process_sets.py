"""Process sets, for programs that import `horovod.common.process_sets`."""

from ..process_sets import ProcessSet
from ..world import add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
