"""Finds the optimizers of this process, and the modules whose forward changes parameters, at every save.

Nothing leads from a tensor to who changes it, so they are found by what refers to their classes, as objects do. That walks
over all objects there are (tens of milliseconds), and is done again only when some came or went: each object counts as a
reference to its class, and classes are few.

To refer to all objects, even for a moment, breaks other threads: a tuple that is being made from an iterator cannot grow
when anybody else has it.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

_LEARNED_RANGE = "torch.ao.quantization._learnable_fake_quantize"


class OptimizerFinder:
    """Finds them, and remembers who was found, without keeping anybody alive."""

    def __init__(self) -> None:
        self._counts: list[tuple[int, int]] = []
        self._found: list[weakref.ref[object]] = []

    def take(self) -> list[object]:
        """Return the living optimizers, and the modules of torch that may change parameters in forward."""
        kinds = (Optimizer, nn.Embedding, nn.EmbeddingBag, *_learned_ranges())
        classes = list(_with_subclasses(kinds))
        counts = [(id(cls), sys.getrefcount(cls)) for cls in classes]
        found = [known() for known in self._found]
        if counts != self._counts or None in found:
            found = [one for one in gc.get_referrers(*classes) if issubclass(type(one), kinds)]
            self._counts, self._found = counts, list(map(weakref.ref, found))
        return found


def changed_in_forward(module: object) -> Iterator[torch.Tensor]:
    """Yield the parameters that forward of *module* changes by itself.

    From torch 2.13's source: ``max_norm`` renormalises the rows that are looked up, in place; a learned fake quantisation
    limits its scale. A module of somebody else with a ``max_norm`` is taken for one that hands it, and parameters of its
    own, to torch.
    """
    if not isinstance(module, nn.Module) or "_parameters" not in vars(module):  # none yet in the middle of `__init__`
        return
    if isinstance(module, _learned_ranges()):
        yield from module.parameters()
    elif limit_of(module) is not None:
        yield from module.parameters(recurse=isinstance(module, nn.Embedding | nn.EmbeddingBag))  # or what makes them
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))  # a view of a flat one


def limit_of(module: object) -> object:
    """Return the norm that forward of *module* keeps its rows below; None when it has no such thing."""
    return getattr(module, "max_norm", None)


def _learned_ranges() -> tuple[type, ...]:
    known = sys.modules.get(_LEARNED_RANGE)
    return () if known is None else (known._LearnableFakeQuantize,)


def _with_subclasses(kinds: tuple[type, ...]) -> Iterator[type]:
    classes = list(kinds)
    for cls in classes:
        classes += cls.__subclasses__()
    return iter(dict.fromkeys(classes))
