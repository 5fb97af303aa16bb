"""Stored names of the keys in a sharded state dict, also for a step that another framework has saved.

In such a step a parameter has the same name as here, and the optimizer a form of torch
(`aiockpt.adapters.optimizer_forms`): moments by the names of parameters, and groups, whose values Megatron's groups get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import aiockpt
from aiockpt.adapters.leaves import read_plain_leaf
from aiockpt.adapters.optimizer_forms import Id, agreed_values, pair_up, read_form
from aiockpt.adapters.stored import is_tensor_node
from aiockpt.format.names import dotted, join_name, split_name
from aiockpt.integrations.megatron.sharded_leaves import (
    MAIN,
    GroupSettings,
    ShardParts,
    leaf_name,
    mapping,
    path_of,
    split_state_key,
)
from aiockpt.state.tree import Decoder, Path

COMMON = "common"
"""The key of all values that are not leaves of Megatron, which rank 0 saves for all."""
STEP = "step"


class StoredNames:
    """The names that the leaves of a sharded state dict have in a step.

    Attributes:
        is_foreign: whether another framework has saved the step.
        tensors: the tensors of the step, by all their names.
    """

    def __init__(self, saved: aiockpt.Description, bases: Sequence[Any]) -> None:
        values: Any = saved.values
        self._values: dict[str, Any] = values
        self._step = saved.info.step
        self.is_foreign: bool = COMMON not in self._values
        self.tensors = {tensor.name: tensor for tensor in saved.tensors}
        self.tensors |= {name: self.tensors[home] for name, home in saved.alias.items() if home in self.tensors}
        self._by_dots = {dotted(name): name for name in self.tensors}
        self._form = read_form(self._values.get("optimizer"), ("optimizer",)) if self.is_foreign else None
        wanted = {of_state[1] for base in bases if (of_state := split_state_key(base.key)) is not None}
        self._ids = {} if self._form is None or self._form.by_numbers else pair_up([sorted(wanted)], self._form)
        if self.is_foreign and any(split_state_key(base.key) and not isinstance(base, ShardParts) for base in bases):
            raise aiockpt.UsageError(
                "another framework has saved this step, and its optimizer fits Megatron's distributed one alone: "
                "set use_distributed_optimizer=True, and load into its optimizer_state()"
            )

    def tensor(self, key: str) -> str | None:
        """Return the name of the tensor for a key, or None."""
        of_state = split_state_key(key)
        if (name := join_name(path_of(key))) in self.tensors:
            return name
        if of_state is None:
            return self._by_dots.get(".".join(path_of(key)))
        slot, parameter = of_state
        if slot in MAIN:
            return self.tensor(parameter)
        return self._state_tensor(parameter, slot)

    def _state_tensor(self, parameter: str, slot: str) -> str | None:
        state = {} if self._form is None else self._form.state.get(self._ids.get(parameter, ""), {})
        return state[slot]["name"] if is_tensor_node(state.get(slot)) else None

    def has(self, base: Any) -> bool:
        """Return whether the step has a leaf, or a value can be derived for it."""
        if not isinstance(base, mapping.ShardedObject):
            return self.tensor(base.key) is not None
        return leaf_name(base) in self._values or self.is_derived(base)

    def is_derived(self, base: Any) -> bool:
        """Return whether the value of an object is derived from a step of another framework."""
        of_optimizer = isinstance(base, GroupSettings) and self._form is not None
        return self.is_foreign and (of_optimizer or base.key.endswith("_extra_state"))

    def unasked(self, asked: Iterable[Any]) -> set[str]:
        """Return the names of tensors, and of objects with a place, that are not in *asked*."""
        taken = {self._name(base) for base in asked}
        counts = {name for name in self.tensors if _is_count(split_name(name))}
        named = {join_name((name,)) for name in self._values if "/shard_" in name}
        return ({*self.tensors} | named) - counts - taken

    def _name(self, base: Any) -> str | None:
        return join_name((base.unique_key,)) if isinstance(base, mapping.ShardedObject) else self.tensor(base.key)

    # ------------------------------------------------------------------ what another framework has saved

    def counts(self, bases: Iterable[Any]) -> dict[str, torch.Tensor]:
        """Return tensors for the step counts of parameters, by their names in the step."""
        asked = {base.parameter for base in bases if isinstance(base, ShardParts)}
        names = {self._state_tensor(parameter, STEP) for parameter in asked} if self.is_foreign else set()
        return {name: torch.zeros(()) for name in sorted(filter(None, names))}

    def derive(self, base: Any, counts: Mapping[str, torch.Tensor]) -> Any:
        """Return the value of an object that `is_derived`: from the step where that has it, else the present value.

        Raises:
            UsageError: the parameters have different step counts.
        """
        if not isinstance(base, GroupSettings) or self._form is None:
            return base.data
        if type(base.data) is int:
            steps = {int(count) for count in counts.values()}
            if len(steps) > 1:
                raise aiockpt.UsageError(f"parameters have made {sorted(steps)} steps: Megatron has one count for all")
            return max(steps, default=0)
        ids: list[Id] = [self._ids[name] for name in base.parameters if name in self._ids]
        values, _ = agreed_values(self._form, ids or list(self._form.group_of()), str)
        return base.data | {key: self._plain(node) for key, node in values.items() if key in base.data}

    def _plain(self, node: Any) -> Any:
        return Decoder(None, _PlainLeaves()).decode(node, ("optimizer", "param_groups"))

    def plain(self, here: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain values in place of stored ones: those of *here*, with the number of the step as ``iteration``."""
        return {**here, **({"iteration": self._step} if "iteration" in here else {})}


class _PlainLeaves:
    """Reads values that hold no tensors."""

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        return read_plain_leaf(kind, node, path, decoder)


def _is_count(path: Path) -> bool:
    """Return whether a name is that of a parameter's step count, which only other frameworks request."""
    return len(path) == 2 and path[0] == "optimizer" and str(path[1]).endswith(f".{STEP}")
