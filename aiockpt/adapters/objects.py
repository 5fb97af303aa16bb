"""Saving and loading of objects with a state of their own: any with ``state_dict()``, loaders, and values of one rank.

A value of one rank (`aiockpt.adapters.rng.per_rank`, a random generator, a reader of data) is stored separately for each
rank. The readers of a loader are stored under their data-parallel ranks, so that any number of readers can continue.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import HOW_TO_STEP, NAMES, Stateful, driven_by, innermost, kind_of, reads_data, scheduler_in
from aiockpt.adapters.leaves import Run
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.optimizer import is_plain, keeper_of
from aiockpt.adapters.optimizer_forms import pairs_of
from aiockpt.adapters.optimizer_target import set_value
from aiockpt.adapters.rng import RNG, PerRank, derive_state
from aiockpt.adapters.schedules import get_state, go_on
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.adapters.tensors import may_spread
from aiockpt.data.data_source import load_bare, with_data
from aiockpt.data.loader import Loader
from aiockpt.data.resume_log import log_resumed_bare
from aiockpt.format.names import join_name
from aiockpt.state.codecs import class_name, field
from aiockpt.state.layout import axes_in_memory
from aiockpt.state.tree import TAG, Node, Path, damaged, refuse


def write_stateful(value: Stateful, path: Path, run: Run) -> Node:
    """Write an object with ``state_dict()``, which may return any value."""
    if isinstance(value, LRScheduler):
        return {TAG: "stateful", "value": run.encode(get_state(value), path), "class": class_name(type(value))}
    return {TAG: "stateful", "value": run.encode(value.state_dict(), path)}


def load_stateful(value: Any, path: Path, matcher: Matcher) -> None:
    """Load an object; the checkpoint may instead have its ``state_dict()``, saved as a plain dict."""
    if not matcher.selects_whole(path, "it has its own load_state_dict()"):
        return
    if driven_by(value) is None:
        _load_object(value, path, matcher)
    else:
        matcher.schedulers.append((value, path))


def load_schedulers(matcher: Matcher) -> None:
    """Load the schedulers that were met, now that the groups of all optimizers are known."""
    known = []
    for value, path in matcher.schedulers:
        make_up = matcher.make_ups.get(id(driven_by(value)))
        if (scheduler := scheduler_in(value)) is not None:
            known.append((scheduler, path))
        elif make_up is None or make_up.lined_up:
            _load_object(value, path, matcher)
        else:
            matcher.mismatch(
                path,
                f"the groups of its optimizer have changed, and how a {type(value).__qualname__} goes on with other rates "
                f'is not known; strict={{"{join_name(path)}": False}} keeps it as it is here',
            )
    go_on(known, matcher)


def _load_object(value: Any, path: Path, matcher: Matcher) -> None:
    found = matcher.find(path)
    node: Any = None if found is None else found.node
    if type(node) is dict and node.get(TAG) == "stateful":
        node = node.get("value")
    elif pairs_of(node) is None:
        matcher.miss(path)
        return
    template = value.state_dict() if may_spread() or matcher.renames else None
    if matcher.renames and node is not None and (node := matcher.rename_keys(path, node, template)) is None:
        return
    matcher.hand_over(
        value, path, value.load_state_dict, matcher.values.fresh(path, node, template if may_spread() else None)
    )


def write_loader(loader: Loader[Any], path: Path, run: Run) -> Node:
    """Write the state that the readers of a loader share, and that of this data-parallel rank, under its number.

    So peers that read the same data write equal trees, and the union of all trees has every data-parallel rank once.
    """
    held, rank = loader.held(), str(loader.rank)
    own = {rank: run.encode(held.own, (*path, "readers", rank))} if loader.saves else {}
    shared = run.encode(held.shared, (*path, "shared"))
    return {TAG: "loader", "form": held.form, "size": loader.size, "shared": shared, "readers": own}


def load_loader(loader: Loader[Any], path: Path, matcher: Matcher) -> None:
    """Load the state from which the readers of this rank continue: that of as many stored readers as they need."""
    if not matcher.selects_whole(path, "a loader resumes as a whole"):
        return
    node = matcher.find_tagged(path, "loader")
    if node is None:
        matcher.miss(path)
        return
    try:
        form, shared = node["form"], node["shared"]
        size, readers = field(node, "size", int), field(node, "readers", dict)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"is not the state of a loader ({error!r})") from error
    if (misfit := loader.misfit(form, size, readers)) is not None:
        matcher.mismatch(path, misfit)
        return
    needed = [str(rank) for rank in loader.needed_ranks(size)]
    value = matcher.values.request(path, {"shared": shared, "owns": [readers[rank] for rank in needed]})
    # The readers that this rank does not need are no difference.
    matcher.pass_over(path)

    def resume() -> None:
        saved = value()
        loader.resume(saved["shared"], saved["owns"])

    matcher.later(resume)


def write_own(value: Any, path: Path, index: Index, run: Run) -> Node:
    """Write a value of this rank: an object, or the value that `per_rank` wraps."""
    held = of_this_rank(value, index)
    is_object = kind_of(held) in ("stateful", "per_rank", "module")
    run.per_rank[join_name(path)] = run.encode_own(with_data(held, held.state_dict()) if is_object else held, path)
    return {TAG: "per_rank"}


def load_own(value: Any, path: Path, index: Index, matcher: Matcher) -> None:
    """Load a value of this rank: an object, or the value that `per_rank` wraps."""
    if not matcher.selects_whole(path, "it belongs to one rank"):
        return
    holder = of_this_rank(value, index)
    if reads_data(holder) and matcher.stored.world_changed:
        matcher.miss(
            path,
            f"{matcher.stored.world_changed}; wrap it in aiockpt.Loader(...), so that no sample is lost or repeated",
        )
        return
    found = matcher.find_own(path)
    if found is None and isinstance(holder, RNG) and _derive_random(holder, path, matcher):
        return
    if found is None:
        matcher.miss(path, _why_none(path, matcher))
        return
    if kind_of(holder) in ("stateful", "per_rank"):
        state, may_refuse = matcher.values.request(path, found.node), isinstance(holder, OwnOptimizer)
        if reads_data(holder):
            matcher.later(lambda: log_resumed_bare(holder, state(), join_name(path)))
        matcher.hand_over(
            holder,
            path,
            partial(load_bare, holder, where=join_name(path)) if reads_data(holder) else holder.load_state_dict,
            state,
            # Generators are set last: the ``load_state_dict()`` of other objects may draw numbers.
            last=isinstance(holder, RNG),
            may_refuse=may_refuse,
        )
    elif isinstance(holder, nn.Module):
        # Its tensors are filled where they lie; the rest is for its own `load_state_dict()`.
        if (own := matcher.values.refill(path, holder.state_dict(), found.node)) is not None:
            matcher.hand_over(holder, path, holder.load_state_dict, own)
    elif (own := matcher.values.refill(path, holder, found.node)) is not None:
        matcher.later(lambda: setattr(value, "value", own()))


def _why_none(path: Path, matcher: Matcher) -> str | None:
    """Return why the checkpoint has no value of this rank at *path*, and a remedy; None if it has one of no rank."""
    if matcher.find(path) is None:
        return None
    if matcher.find_tagged(path, "per_rank") is None:
        return "one value for all ranks in the checkpoint; load it without aiockpt.per_rank(...)"
    changed = f" ({matcher.stored.world_changed})" if matcher.stored.world_changed else ""
    return f"this rank has none in the checkpoint{changed}; strict=False keeps what is here, only= leaves it out"


def _derive_random(rng: RNG, path: Path, matcher: Matcher) -> bool:
    """Derive the generators of a rank that is not in the checkpoint; return whether it has a state to derive them from."""
    found = matcher.find_of_another(path)
    if found is None:
        return False
    state = matcher.values.request(path, found.node)
    matcher.later(
        lambda: rng.load_state_dict(derive_state(state(), matcher.stored.rank, matcher.stored.step)), last=True
    )
    return True


# State of ``aiockpt.per_rank(optimizer)``: the whole local state of an optimizer, as it is, for this rank alone.
#
# For state in which ranks differ on purpose (their own preconditioners, different group values for one parameter). It loads
# on the same number of ranks, for the same parameters with the same sharding: it cannot be resharded. A DTensor is saved
# as its local part, and made again on the mesh of its parameter.


_PLACED, _SHAPE, _LOCAL = "dtensor placed", "of shape", "local"
"""Keys of the dict that stands for a DTensor."""


def of_this_rank(value: Any, index: Index) -> Any:
    """Return the value of this rank: an object, or what `per_rank` wraps; an optimizer as `OwnOptimizer`."""
    held = value.value if isinstance(value, PerRank) else value
    return OwnOptimizer(held, index) if isinstance(held, Optimizer) else held


class OwnOptimizer:
    """An optimizer as an object with a state of this rank, which includes its parameters that are not in *index*."""

    def __init__(self, optimizer: Optimizer, index: Index) -> None:
        self._optimizer = optimizer
        self._index = index
        self._keeper = keeper_of(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the local parts of DTensors, outside autograd."""
        said = self._keeper.state_dict()
        return {
            "class": class_name(type(innermost(self._keeper))),
            "shapes": self._shapes(),
            "groups": [{key: group[key] for key in group if key not in NAMES} for group in said["param_groups"]],
            "state": {number: _decompose(entry) for number, entry in said["state"].items()},
            "parameters": {number: local.detach() for number, local in self._loose()},
        }

    def _loose(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number and local part of each parameter that no module of the state holds, if the state has modules."""
        if not self._index.paths:  # the weights are saved elsewhere; only the optimizer's state is meant
            return
        parameters = [parameter for group in self._keeper.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if self._index.path_of(parameter) is None:
                yield number, tensor_kind(parameter).local(parameter)

    def _shapes(self) -> list[list[list[int]]]:
        """Return the shape of this rank's part of each parameter of each group."""
        groups = ([tensor_kind(one).local(one) for one in group["params"]] for group in self._keeper.param_groups)
        return [[list(one.shape) for one in some] for some in groups]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: it is of another optimizer, or the parameters are spread differently here.
        """
        keeper, here = self._keeper, self._shapes()
        own = {class_name(type(keeper)), class_name(type(innermost(keeper)))}  # 0.1.0 wrote the class of the wrapper
        if saved["class"] not in own or saved["shapes"] != here:
            raise ValueError(
                f"it was saved for a {saved['class']} with parts of shapes {saved['shapes']}, and here is a "
                f"{class_name(type(keeper))} with parts of shapes {here}; what belongs to one rank is not resharded"
            )
        loose = saved.get("parameters", {})  # 0.1.0 did not write them
        with torch.no_grad():
            for number, local in self._loose():
                if number in loose:
                    local.copy_(loose[number])
        parameters = [parameter for group in keeper.param_groups for parameter in group["params"]]
        state = {number: _put_together(entry, parameters[number]) for number, entry in saved["state"].items()}
        if not is_plain(keeper):
            numbers = keeper.state_dict()["param_groups"]
            groups = [{**own, **group} for own, group in zip(numbers, saved["groups"], strict=True)]
            keeper.load_state_dict({"state": state, "param_groups": groups})
            return
        for group, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            for key, value in values.items():
                if key not in HOW_TO_STEP:
                    set_value(group, key, value)
        for number, parameter in enumerate(parameters):
            keeper.state.pop(parameter, None)
            if number in state:
                keeper.state[parameter] = state[number]
        keeper.__setstate__({"state": keeper.state, "param_groups": keeper.param_groups})


def _decompose(value: Any) -> Any:
    """Return a value of the state with each DTensor replaced by its local part and description."""
    kind = tensor_kind(value)
    if kind.mesh is not None:
        placements = kind.mesh.placements(value)
        if not placements:
            refuse(("per_rank",), f"a DTensor placed as {value.placements}; redistribute it to Shard or Replicate")
        return {_PLACED: list(placements), _SHAPE: list(value.shape), _LOCAL: kind.local(value)}
    if type(value) is dict:
        return {key: _decompose(item) for key, item in value.items()}
    return type(value)(map(_decompose, value)) if type(value) in (list, tuple) else value


def _put_together(value: Any, parameter: torch.Tensor) -> Any:
    """Return the value that `_decompose` received, with its DTensors on the mesh of *parameter*."""
    if type(value) is dict and value.keys() == {_PLACED, _SHAPE, _LOCAL}:
        local, made = value[_LOCAL], None
        if (mesh := tensor_kind(parameter).mesh) is not None:
            axes = axes_in_memory(local.shape, local.stride())
            made = mesh.place(value[_PLACED], parameter, tuple(value[_SHAPE]), local.dtype, axes)
        if made is None or tensor_kind(made).local(made).shape != local.shape:
            raise ValueError(
                f"beside a DTensor of shape {value[_SHAPE]} is a parameter that is spread in another way here"
            )
        tensor_kind(made).local(made).copy_(local)
        return made
    if type(value) is dict:
        return {key: _put_together(item, parameter) for key, item in value.items()}
    return type(value)(_put_together(item, parameter) for item in value) if type(value) in (list, tuple) else value
