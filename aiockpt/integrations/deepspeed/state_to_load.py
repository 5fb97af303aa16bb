"""Mapping of a saved step into an engine, by name and in any precision; nothing changes before all parts fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

import aiockpt
from aiockpt.adapters.kinds import HOW_TO_STEP, NAMES
from aiockpt.adapters.module import EXTRA
from aiockpt.adapters.optimizer_forms import SavedOptimizer, agreed_values, class_misfit, pair_up, read_form
from aiockpt.adapters.stored import is_tensor_node
from aiockpt.adapters.tensors import torch_dtype
from aiockpt.format.names import dotted
from aiockpt.integrations.deepspeed.named_state import MODEL, OPTIMIZER, PROGRESS, group_settings, module_leaves
from aiockpt.integrations.deepspeed.partition_fit import PartitionFit, different_values, fit_partition
from aiockpt.integrations.deepspeed.partitions import (
    FlatPartition,
    find_partitions,
    finish_weights,
    inner_optimizer,
)
from aiockpt.integrations.nested import put, value_at
from aiockpt.state.tree import TAG


class StateToLoad:
    """The parts of an engine that `aiockpt.Checkpointer.load` fills.

    Attributes:
        state: the state to fill.
    """

    def __init__(self, engine: Any, saved: aiockpt.Description) -> None:
        self._engine = engine
        self._saved = saved
        self._partitions = find_partitions(engine)
        self._values: Any = saved.values
        self._tensors = {_path_of(tensor.name): tensor for tensor in saved.tensors}
        self._tensors |= {
            _path_of(name): self._tensors[_path_of(home)]
            for name, home in saved.alias.items()
            if _path_of(home) in self._tensors
        }
        self._after: list[Callable[[], object]] = []
        self.state: dict[str, Any] = {}

    @torch.no_grad()
    def finish(self) -> None:
        """Set the parts that are not filled in place; call it after the load."""
        for change in self._after:
            change()

    # ------------------------------------------------------------------ weights

    def ask_weights(self) -> None:
        """Request the weights, in the precision of the optimizer where it has one of its own."""
        node = self._values.get(MODEL)
        # Otherwise the step has a module, or its state_dict().
        is_nested = type(node) is dict and TAG not in node and not any("." in str(key) for key in node)
        for name, leaf in module_leaves(self._engine, self._partitions):
            path = (MODEL, *(name.split(".") if is_nested else (name,)))
            if name.rpartition(".")[2] == EXTRA:
                self._after.append(partial(self._set_extra_state, name, path))
                put(self.state, path, None)
            else:
                put(self.state, path, self._in_saved_precision(name, leaf))
        if self._partitions:
            self._after.append(partial(finish_weights, self._engine, self._partitions))

    def _set_extra_state(self, name: str, path: tuple[str, ...]) -> None:
        self._engine.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value_at(self.state, path))

    def _in_saved_precision(self, name: str, leaf: torch.Tensor) -> torch.Tensor:
        """Return the leaf to read into: *leaf*, or one of the saved precision that is copied into it afterwards."""
        saved = self._tensors.get((MODEL, *name.split(".")))
        dtype = leaf.dtype if saved is None else torch_dtype(saved.dtype)
        if dtype == leaf.dtype or not (dtype.is_floating_point and leaf.is_floating_point()):
            return leaf
        if not isinstance(leaf, aiockpt.Shards):
            made = torch.empty_like(leaf, dtype=dtype, requires_grad=False)
            self._after.append(partial(_copy, leaf, made))
            return made
        shards = leaf.empty_like(dtype)
        for target, read in zip(leaf.held.pieces, shards.held.pieces, strict=True):
            self._after.append(partial(_copy, target.local, read.local))
        return shards

    # ------------------------------------------------------------------ the optimizer

    def ask_optimizer(self, read: Callable[[list[str]], dict[str, Any]]) -> None:
        """Request the optimizer. All ranks find and raise the same differences, before any rank loads.

        Args:
            read: returns scalars of the step, by the names of their tensors, the same on all ranks.

        Raises:
            StateMismatchError: the step has no optimizer, or lacks the state of some parameters, or the states of the
                parameters of a partition do not fit into one.
        """
        if not self._partitions:
            return
        saved = read_form(self._values.get(OPTIMIZER), (OPTIMIZER,))
        groups = group_settings(self._engine, self._partitions)
        ids = {} if saved is None else pair_up([group["params"] for group in groups], saved)
        missing = [name for group in groups for name in group["params"] if name not in ids]
        found = [f"the optimizer of the checkpoint has no parameter {name}" for name in missing]
        if saved is not None and not missing:
            for group in groups:
                found += agreed_values(saved, [ids[name] for name in group["params"]], str)[1]
        if saved is None or found:
            raise self._mismatch(found)
        if (misfit := self._class_misfit(saved)) is not None:
            raise self._mismatch([misfit])
        parts = [
            (part, {one.name: entry for one in part.slices if (entry := saved.state.get(ids[one.name]))})
            for part in self._partitions
        ]
        fits = self._fit_partitions(parts, read)
        state: dict[str, Any] = {}
        for (part, states), fit in zip(parts, fits, strict=True):
            made = self._make_state(part, fit)
            for one in part.slices:
                if one.name in states:
                    state[one.name] = {
                        key: None if tensor is None else part.part_of(tensor, one) for key, tensor in made.items()
                    }
            self._after.append(partial(self._set_state, part, made))
        self.state[OPTIMIZER] = {"state": state, "param_groups": groups}
        self._after.append(self._set_groups)

    def _class_misfit(self, saved: SavedOptimizer) -> str | None:
        kind = self._values.get(PROGRESS, {}).get("optimizer")
        if kind:
            saved = msgspec.structs.replace(saved, class_name=kind["class"], keys=frozenset(kind["keys"]))
        return class_misfit(inner_optimizer(self._engine), saved)

    def _mismatch(self, problems: list[str]) -> aiockpt.StateMismatchError:
        return aiockpt.StateMismatchError(
            self._saved.info.id, problems, "load_checkpoint(…, load_optimizer_states=False) begins with a new one."
        )

    def _find_tensor(self, node: Any) -> aiockpt.TensorInfo | None:
        return self._tensors.get(_path_of(node["name"])) if is_tensor_node(node) else None

    def _fit_partitions(
        self, parts: list[tuple[FlatPartition, dict[str, Any]]], read: Callable[[list[str]], dict[str, Any]]
    ) -> list[PartitionFit]:
        fits = [
            fit_partition(states, {one.name: one.shape for one in part.slices}, self._find_tensor)
            for part, states in parts
        ]
        problems = [problem for fit in fits for problem in fit.problems]
        if problems:
            raise self._mismatch(problems)
        nodes = [
            (key, {name: entry[key] for name, entry in states.items()})
            for (_, states), fit in zip(parts, fits, strict=True)
            for key in fit.single
        ]
        # Partitions of a single parameter always agree, as without ZeRO.
        several = [(key, by_name) for key, by_name in nodes if len(by_name) > 1]
        infos = [self._find_tensor(node) for _, by_name in several for node in by_name.values()]
        values = read(sorted({info.name for info in infos if info is not None}))
        problems = [
            problem for key, by_name in several for problem in different_values(key, by_name, values, self._find_tensor)
        ]
        if problems:
            raise self._mismatch(problems)
        return fits

    def _make_state(self, part: FlatPartition, fit: PartitionFit) -> dict[Any, torch.Tensor | None]:
        """Return the optimizer's values for a partition: tensors of its layout, and None for single values."""
        live = inner_optimizer(self._engine).state.get(part.key, {})
        made: dict[Any, torch.Tensor | None] = dict.fromkeys(fit.single)
        for key, dtype in fit.spread.items():
            there = live.get(key)
            fits = isinstance(there, torch.Tensor) and (there.shape, there.dtype) == (part.key.shape, dtype)
            made[key] = there if fits else torch.zeros_like(part.key, dtype=dtype, requires_grad=False)
        return made

    def _set_state(self, part: FlatPartition, made: dict[Any, torch.Tensor | None]) -> None:
        state, live = self.state[OPTIMIZER]["state"], inner_optimizer(self._engine).state
        if not made:
            live.pop(part.key, None)
            return
        before = live.get(part.key, {})
        counts_in_tensors = isinstance(inner_optimizer(self._engine), torch.optim.Adam)  # DeepSpeed's in integers
        entry: dict[Any, Any] = {}
        for key, tensor in made.items():
            if tensor is None:
                values = {one.name: state[one.name][key] for one in part.slices if key in state.get(one.name, {})}
                entry[key] = _single(values, before.get(key))
                if counts_in_tensors and type(entry[key]) is int:
                    entry[key] = torch.tensor(float(entry[key]))
                continue
            entry[key] = tensor
            for one in part.slices:
                # The tensor may be the live one, with old moments: parameters without saved state begin at zero.
                if key not in state.get(one.name, {}) and tensor.shape == part.key.shape:
                    tensor.view(-1)[one.offset : one.offset + one.count].zero_()
        live[part.key] = entry

    def _set_groups(self) -> None:
        """Set the values of each group from the groups of its parameters, which agree."""
        loaded = self.state[OPTIMIZER]["param_groups"]
        names = group_settings(self._engine, self._partitions)
        for number, (group, own) in enumerate(zip(inner_optimizer(self._engine).param_groups, names, strict=True)):
            said = [one for one in loaded if set(own["params"]) & set(one["params"])]
            if not own["params"] and len(loaded) == len(names):
                said = [loaded[number]]
            for one in said:
                group.update({key: value for key, value in one.items() if key not in (*NAMES, *HOW_TO_STEP)})


def _path_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name of the step; dots in a key (of a state dict) also separate parts."""
    return tuple(dotted(name).split("."))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _single(values: dict[str, Any], before: Any) -> Any:
    """Return the value that all parameters of a partition have, in the optimizer's present tensor if there is one."""
    value = next(iter(values.values()))
    if isinstance(before, torch.Tensor):
        return before.fill_(value)
    return value.clone() if isinstance(value, torch.Tensor) else value
