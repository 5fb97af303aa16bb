"""Selection of what is saved: ``only=`` and ``exclude=`` of a save, by name or by rule.

A name chooses its leaf and all below it: ``"model.base"``. A part of a name may be a pattern as for file names
(``"model.layers.*.lora_?"``); ``**`` matches any number of parts (``"**.lora_A"``). An object that loads as a whole (an
optimizer, a plain value, an object with ``state_dict()``) is chosen as a whole.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import msgspec
from torch import nn
from torch.optim import Optimizer

from aiockpt.adapters.kinds import find_objects
from aiockpt.adapters.rename import refuse_idle
from aiockpt.errors import UsageError
from aiockpt.format.names import join_name, prefixes, split_name
from aiockpt.options import refuse_value
from aiockpt.state.tree import Path

_ANY = "**"
_reported: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules for which a notice of `trainable` was logged already."""

logger = logging.getLogger("aiockpt")


class Trainable(msgspec.Struct, frozen=True):
    """The rule of `trainable`.

    Attributes:
        added: whether parameters that adapters add to a base model are saved even if frozen.
        besides: names of further frozen parameters that are saved.
    """

    added: bool = False
    besides: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "aiockpt.trainable()"


def trainable() -> Trainable:
    """Return the rule that leaves out frozen parameters: ``save(step, state, only=aiockpt.trainable())``.

    A parameter of a module is frozen if it does not require gradients and no optimizer of the state owns it. All else is
    saved: buffers, optimizers, values. So a LoRA run saves its adapters; its base is loaded from the original source.
    """
    return Trainable()


class Selection(msgspec.Struct, frozen=True):
    """The part of a state to save; by default all of it. Equal selections choose the same parts of the same state."""

    only: tuple[str, ...] | Trainable | None = None
    exclude: tuple[str, ...] = ()


ALL = Selection()


def make_selection(
    only: str | Sequence[str] | Trainable | None, exclude: str | Sequence[str] | None, default: Selection = ALL
) -> Selection:
    """Return the selection for the arguments of a save; an argument of None takes the value of *default*.

    Raises:
        UsageError: they are not names, or *only* is an empty list.
    """
    chosen = default.only if only is None else only if isinstance(only, Trainable) else _names("only", only)
    if chosen == ():
        raise UsageError("only=[] saves nothing: give names of the state, or leave it out to save all")
    return Selection(chosen, default.exclude if exclude is None else _names("exclude", exclude))


def _names(option: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        what = "a name of the state, or a list of them, such as ['model.base']"
        refuse_value("", option, names, f"{what}, or aiockpt.trainable()" if option == "only" else what)
    return tuple(names)


class LeafChoice:
    """One selection applied to the leaves of one state.

    Args:
        state: for rules that depend on the owner of a parameter.
        alone: whether no other rank may have leaves that a name matches.
    """

    def __init__(self, selection: Selection, state: Mapping[str, Any], *, alone: bool = True) -> None:
        rule = selection.only
        self._only = None if rule is None or isinstance(rule, Trainable) else {split_name(name): name for name in rule}
        self._exclude = {split_name(name): name for name in selection.exclude}
        self._frozen = _frozen(state, rule) if isinstance(rule, Trainable) else set[int]()
        self._besides = rule.besides if isinstance(rule, Trainable) else ()
        self.by_rule = isinstance(rule, Trainable)
        self._seen: set[str] = set()
        self._names: set[str] = set()
        self._alone = alone

    def keeps(self, path: Path, tensor: object = None) -> bool:
        """Return whether the leaf at *path* is saved; *tensor* is the live one, for rules that need it."""
        self._names.update(prefixes(join_name(path)))
        excluded = self._matches(self._exclude, path)
        chosen = self._only is None or self._matches(self._only, path)
        return chosen and not excluded and (id(tensor) not in self._frozen or join_name(path) in self._besides)

    def keeps_whole(self, path: Path, value: object = None) -> bool:
        """Return the same for an object that is saved as a whole or not at all, such as an optimizer or a plain value.

        Raises:
            UsageError: a name matches a part of it.
        """
        for pattern, name in {**(self._only or {}), **self._exclude}.items():
            if len(pattern) > len(path) and _ANY not in pattern and _match(pattern[: len(path)], path):
                whole = join_name(path)
                raise UsageError(
                    f"{name!r} is a part of {whole!r}, which is saved as a whole or not at all: name {whole!r}"
                )
        return self.keeps(path, value)

    def check(self) -> None:
        """Refuse names that match nothing in the state, unless another rank may have the leaf.

        Raises:
            UsageError: there are such names; the message lists them, with similar ones.
        """
        for option, names in (("only", self._only or {}), ("exclude", self._exclude)):
            if self._alone:
                refuse_idle(option, set(names.values()) - self._seen, self._names)

    def _matches(self, patterns: Mapping[Path, str], path: Path) -> bool:
        hits = [name for pattern, name in patterns.items() if _begins(pattern, path)]
        self._seen.update(hits)
        return bool(hits)


def frozen_names(module: nn.Module, rule: Trainable, root: str) -> list[str]:
    """Return the names below *root* of the parameters of a module that *rule* leaves out."""
    frozen = _frozen({root: module}, rule)
    named = ((f"{root}.{name}", one) for name, one in module.named_parameters(remove_duplicate=False))
    return [name for name, one in named if id(one) in frozen and name not in rule.besides]


def _frozen(state: Any, rule: Trainable) -> set[int]:
    """Return the identity of each frozen parameter of a state that *rule* leaves out; log suspicious ones."""
    modules = [module for _, module in find_objects(state, nn.Module)]
    groups = (group for _, optimizer in find_objects(state, Optimizer) for group in optimizer.param_groups)
    owned = {id(parameter) for group in groups for parameter in group["params"]}
    frozen = {id(parameter) for module in modules for parameter in module.parameters() if not parameter.requires_grad}
    if frozen and frozen <= owned:
        logger.warning(
            "aiockpt.trainable() leaves nothing out: an optimizer of the state owns all %d frozen parameters. Give it the "
            "others only (p for p in model.parameters() if p.requires_grad), or name what to leave out with exclude=",
            len(frozen),
        )
    left_out = frozen - owned
    for module in modules:
        added = {name: id(one) for name, one in _added_parameters(module) if id(one) in left_out}
        if rule.added:
            left_out -= set(added.values())
        elif added and module not in _reported:
            _reported.add(module)
            logger.warning(
                "aiockpt.trainable() leaves out %d frozen parameters that no base model has, of adapters that are not "
                "trained now: %s; where they are not loaded from elsewhere, name them, too: only=['**.lora_*', …]",
                len(added),
                ", ".join(added),
            )
    return left_out


def _added_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model that are not in its base: those that PEFT has added, trained now or earlier.

    PEFT is detected by its attributes, and not imported. A layer that wraps one of the base has ``adapter_layer_names``,
    and the wrapped layer as ``base_layer`` or ``original_module``. A model has ``peft_config``, parameters that its layers
    share under names with its ``prefix``, and prompts in its ``prompt_encoder``.
    """
    added: set[int] = set()
    for member in module.modules():
        if getattr(member, "adapter_layer_names", ()):
            base = {
                id(one)
                for name in ("base_layer", "original_module")
                if hasattr(member, name)
                for one in getattr(member, name).parameters()
            }
            added.update({id(one) for one in member.parameters()} - base)
        if hasattr(member, "peft_config"):
            prefix = getattr(member, "prefix", None)
            added.update(
                id(one)
                for name, one in member.named_parameters()
                if name.startswith("prompt_encoder.") or (prefix and prefix in name)
            )
    return ((name, one) for name, one in module.named_parameters() if id(one) in added)


def _begins(pattern: Path, path: Path) -> bool:
    """Return whether *pattern* matches *path*, or a prefix of it."""
    return any(_match(pattern, path[:length]) for length in range(len(path) + 1))


# Several ``**`` come to the same rests of pattern and path again and again; the cache decides each once.
@lru_cache(1 << 16)
def _match(pattern: Path, path: Path) -> bool:
    if not pattern:
        return not path
    if pattern[0] == _ANY:
        return _match(pattern[1:], path) or (bool(path) and _match(pattern, path[1:]))
    if not path or not _fits(pattern[0], path[0]):
        return False
    return _match(pattern[1:], path[1:])


def _fits(pattern: str | int, part: str | int) -> bool:
    return pattern == part or (type(pattern) is str and fnmatchcase(str(part), pattern))
