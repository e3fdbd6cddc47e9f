"""Lets jobs start sooner: stands for PyTorch's compiler, and lets garbage lie longer.

The compiler takes as long to import as PyTorch itself. Optimisers, groups and
DistributedDataParallel use it to tell it what not to compile. Whatever else is asked for is the
real one's, which is then imported.
"""

import gc
import importlib
import sys
from types import ModuleType, SimpleNamespace

_NAME = "torch._dynamo"


class _Dynamo(ModuleType):
    """Compiles nothing, so that nothing has to be left out."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")

    def disable(self, function, *_, **__):
        return function

    def graph_break(self):
        pass

    def __getattr__(self, name):
        if name in ("__file__", "__spec__"):
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


sys.modules[_NAME] = _Dynamo(_NAME)
# A third of PyTorch's import would be looking for garbage among what is imported.
gc.set_threshold(100_000)
