"""Lets jobs start sooner: stands for PyTorch's compiler, and lets garbage lie longer.

The compiler and what is meant for it take longer to import than the rest of PyTorch. Optimisers,
groups and DistributedDataParallel use the compiler to tell it what not to compile. Whatever else is
asked for is the real one's, which is then imported.
"""

import atexit
import gc
import importlib
import sys
from importlib.machinery import PathFinder
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
            importlib.import_module(_SHAPES)
        return getattr(importlib.import_module(_NAME), name)


# The last that `import torch` imports: how to export programs, and what shapes operations have.
_EXPORT, _SHAPES = "torch.export", "torch._meta_registrations"
# They belong to _SHAPES, which imports them in the one order in which it learns of all of them.
_OF_SHAPES = ("torch._decomp", "torch._prims", "torch._refs")


class _Finder:
    """Finds PyTorch, and leaves the last of its parts for whoever asks for them.

    Without _SHAPES operations on the device "meta" fail; fake tensors ask for it.
    """

    _has_shapes = False

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            spec = PathFinder.find_spec(name)
            if spec is not None:
                whole = spec.loader.exec_module
                spec.loader.exec_module = lambda module: self._execute(whole, module)
            return spec
        if name == _SHAPES:
            self._has_shapes = True
        if name not in _OF_SHAPES or self._has_shapes:
            return None
        importlib.import_module(_SHAPES)
        spec = sys.modules[name].__spec__
        spec.loader = _Loaded(sys.modules[name])
        return spec

    def _execute(self, whole, torch):
        sys.modules.update({name: ModuleType(name) for name in (_EXPORT, _SHAPES)})
        whole(torch)
        for name in (_EXPORT, _SHAPES):
            del sys.modules[name]
            delattr(torch, name.partition(".")[2])
        # The one other thing for which random numbers need them.
        if hasattr(torch._C, "_set_generator_metaclass"):
            torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)
        torch._lazy_modules.update(name.partition(".")[2] for name in (_EXPORT, *_OF_SHAPES))


class _Loaded:
    """Loads a module that has been loaded since somebody asked for it."""

    def __init__(self, module):
        self._module, self._loader = module, module.__spec__.loader

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        module.__spec__.loader = self._loader


sys.modules[_NAME] = _Dynamo(_NAME)
sys.meta_path.insert(0, _Finder())
# A third of PyTorch's import would be looking for garbage among what is imported, and half of its
# end: the first to be registered is the last to be called.
gc.set_threshold(100_000)
atexit.register(gc.freeze)
