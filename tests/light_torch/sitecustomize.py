"""Programs that tests start do not import what torch has for compilers: two thirds of what starting one costs.

``import torch`` registers how each operator computes shapes without data, and the first step of an optimizer imports
``torch._dynamo``, to tell the compiler to stay away: more than two seconds of processor time, in each of the hundreds of
processes of ``make test``, none of which compiles. With this folder on ``PYTHONPATH`` Python imports this module before
anything else: then these modules of torch are empty, and give way to the real ones as soon as anything of them is used, or
one of those that need them is imported. `tests.conftest` sets that path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

LIGHT = ("torch._dynamo", "torch._meta_registrations", "torch.export")
"""Modules that are empty until they are used."""
BY_ITSELF = ("torch._dynamo.config",)
"""Parts of them that need nothing of the rest: each DTensor reads these."""
NEED_SHAPES = ("torch._inductor", "torch.distributed.tensor")
"""Modules that compute shapes without data."""


class _Light(ModuleType):
    """What optimizers ask of the compiler; whatever else is asked of a module is answered by the real one."""

    @staticmethod
    def graph_break() -> None:
        """Do nothing: there is no graph."""

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Return *function* as it is: nothing compiles it. Without one, return what does so."""
        return _Light.disable if function is None else function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (self.__name__, name) == ("torch._dynamo", "utils"):
            return _Utils()
        return getattr(_import_real(self.__name__), name)


class _Utils:
    """What DDP asks of ``torch._dynamo.utils``; the real ones answer the rest."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        """Return the mode of a program that sets none."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        return getattr(_import_real("torch._dynamo").utils, name)


class _LightLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Light(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do the one thing that a program without a compiler needs of the real ones: random generators get their class."""
        if module.__name__ == "torch._meta_registrations" and hasattr(
            sys.modules["torch._C"], "_set_generator_metaclass"
        ):
            # Since torch 2.14 it has another name.
            renamed = find_spec("torch._custom_class_base") is not None
            base = import_module("torch._custom_class_base" if renamed else "torch._opaque_base")
            metaclass = base.CustomClassBaseMeta if renamed else base.OpaqueBaseMeta
            import_module("torch._C")._set_generator_metaclass(metaclass)


class _Finder(MetaPathFinder):
    """Finds the light modules in place of the real ones, until anything below them is imported."""

    def __init__(self) -> None:
        self.light = set(LIGHT)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.light:
            spec = ModuleSpec(fullname, _LightLoader(), is_package=True)
            spec.submodule_search_locations = [f"{folder}/{fullname.rpartition('.')[2]}" for folder in path or ()]
            return spec
        if fullname in BY_ITSELF:
            return None
        if fullname in NEED_SHAPES:
            _import_real("torch._meta_registrations")
        below = next((name for name in self.light if fullname.startswith(f"{name}.")), None)
        if below is not None:
            _import_real(below)
            return find_spec(fullname)
        return None


_finder = _Finder()


def _import_real(name: str) -> ModuleType:
    """Put the real module in the place of the light one, and return it."""
    if name in _finder.light:
        _finder.light.remove(name)
        for replaced in (name, *(part for part in BY_ITSELF if part.startswith(f"{name}."))):
            sys.modules.pop(replaced, None)
        vars(sys.modules["torch"]).pop(name.rpartition(".")[2], None)
    return import_module(name)


sys.meta_path.insert(0, _finder)
