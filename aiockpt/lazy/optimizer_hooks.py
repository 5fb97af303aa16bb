"""Tells whether torch calls its hooks in every step of an optimizer: only then our hook can have it wait.

Torch puts its hooks around ``step`` of a class when the first instance runs ``Optimizer.__init__``. So a class that leaves
that out does not wait, nor does an instance whose ``step`` was replaced. A function that only looks like torch's (everything
that ``functools.wraps`` made of it does) is told by where its code is from.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

_HOOKING = sys.modules[Optimizer.__module__]
_DELEGATES = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("lightning.fabric.wrappers", "_FabricOptimizer"): "_optimizer",
    ("lightning_fabric.wrappers", "_FabricOptimizer"): "_optimizer",
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"): "_optimizer",
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"): "_optimizer",
}
"""Classes without hooks that change nothing themselves, and where they have the optimizer whose ``step`` they call."""


def is_announced(optimizer: Optimizer) -> bool:
    """Return whether every ``step`` of *optimizer* calls torch's hooks before it changes anything."""
    step = vars(optimizer).get("step", type(optimizer).step)
    for cls in type(optimizer).__mro__:
        where = _DELEGATES.get((cls.__module__, cls.__qualname__))
        inner = vars(optimizer).get(where) if where and step is vars(cls).get("step") else None
        if isinstance(inner, Optimizer):
            return is_announced(inner)
    return _calls_hooks(step)


def step_of(optimizer: Optimizer) -> tuple[Hashable, Hashable]:
    """Return what is another one when ``step`` was replaced, of the class or of the instance. Keeps nothing alive."""
    return _token(type(optimizer).step), _token(vars(optimizer).get("step"))


def _token(step: Any) -> Hashable:
    try:
        return weakref.ref(getattr(step, "__func__", step))
    except TypeError:  # None, or made by C code
        return id(step)


def _calls_hooks(step: Any) -> bool:
    """Say whether *step* is torch's wrapper with the hooks, or what a scheduler or ``torch.compile`` put around that.

    Both call it, and compiled code runs the hooks again in every call.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while step is not None:
        step = getattr(step, "__func__", step)
        home = getattr(step, "__globals__", None)
        if home is vars(_HOOKING):
            return bool(getattr(step, "hooked", False))
        if home is vars(lr_scheduler):
            step = getattr(step, "__wrapped__", None)
        elif compiler is not None and home is vars(compiler):
            step = getattr(step, "_torchdynamo_orig_callable", None)
        else:
            return False
    return False
