"""Programs that tests start do not import torch's compiler for the sake of an optimizer: half of what starting one costs.

The first step of an optimizer imports ``torch._dynamo``, to tell the compiler to stay away: more than a second of
processor time, in each of the hundreds of processes of ``make test``, none of which compiles. With this folder on
``PYTHONPATH`` Python imports this module before anything else: then ``torch._dynamo`` is a module that answers these
requests itself, and gives way to the real one as soon as anything else is asked of it. `tests.conftest` sets that path.
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

COMPILER = "torch._dynamo"


class _Light(ModuleType):
    """What optimizers ask of the compiler, and no more."""

    @staticmethod
    def graph_break() -> None:
        """Do nothing: there is no graph."""

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Return *function* as it is: nobody compiles it. Without one, return what does so."""
        return _Light.disable if function is None else function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_import_real(), name)


class _LightLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Light(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Finder(MetaPathFinder):
    """Finds the light module in place of the real one, until anything below it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == COMPILER:
            return ModuleSpec(fullname, _LightLoader(), is_package=True)
        if fullname.startswith(f"{COMPILER}."):
            _import_real()
            return find_spec(fullname)
        return None


_finder = _Finder()


def _import_real() -> ModuleType:
    """Put the real module in the place of the light one, and return it."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        sys.modules.pop(COMPILER, None)
        vars(sys.modules["torch"]).pop("_dynamo", None)
    return import_module(COMPILER)


sys.meta_path.insert(0, _finder)
