"""Loading of a checkpoint into live objects: match leaf by leaf, fill tensors in place, then apply the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from aiockpt.adapters.composite_target import load_composite
from aiockpt.adapters.composites import is_composite, is_composite_node
from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import kind_of, members, reads_data
from aiockpt.adapters.leaves import read_plain_leaf
from aiockpt.adapters.matcher import LoadTarget, Matcher
from aiockpt.adapters.module import is_saved_module, load_module, load_saved_module
from aiockpt.adapters.optimizer_by_parameter import load_by_parameter, tell_left
from aiockpt.adapters.optimizer_forms import find_optimizers, pairs_of, read_node
from aiockpt.adapters.optimizer_target import load_optimizer, node_for
from aiockpt.adapters.own_optimizer import OwnOptimizer, of_this_rank
from aiockpt.adapters.plain_values import DICTS, name_of_node, removed
from aiockpt.adapters.rename import OptimizerState, Rename, Strict
from aiockpt.adapters.rng import RNG, derive_state
from aiockpt.adapters.schedulers import give_state, keep_lists, scheduler_misfit, take_state
from aiockpt.adapters.stored import Stored, is_tensor_node, members_of, metadata_in
from aiockpt.adapters.tensors import may_spread
from aiockpt.data.data_source import warn_of_empty_loop
from aiockpt.data.loader import Loader
from aiockpt.errors import UsageError, kind_in_words
from aiockpt.format.document import collector_paused
from aiockpt.format.names import join_name
from aiockpt.state.codecs import DEFAULT_CODECS, CodecRegistry
from aiockpt.state.scalars import field
from aiockpt.state.tree import TAG, Decoder, Path, damaged, set_metadata

# Dicts, lists and tuples that are loaded part by part.
#
# - A plain value that only the state has is removed, and reported; one that only the checkpoint has is added. So the plain
#   part is afterwards what was saved, as for a dict of plain values. (Where other ranks may have it, nothing is added.)
# - Tensors and objects are requested by name: they are never removed, and never made.
# - The items of a tuple cannot be set: where one is another afterwards, another tuple takes its place.


Value = Callable[[], Any]


def set_part(container: Any, key: Any, value: Value) -> None:
    """Set one part of a container, unless what is there was filled."""
    new = value()
    if container[key] is not new:
        container[key] = new


def set_tuple(container: Any, key: Any, items: list[Any]) -> None:
    """Put another tuple in the place of one, where an item is another one now."""
    if any(item is not new for item, new in zip(container[key], items, strict=True)):
        container[key] = tuple(items)


def keys_only_here(container: Mapping[Any, Any], path: Path, matcher: Matcher) -> list[Any]:
    """Return the keys of the plain values that the checkpoint's dict at *path* does not have."""
    found = matcher.find(path)
    if found is None or name_of_node(found.node) not in DICTS or not matcher.selects(path):
        return []
    plain = (key for key, value in container.items() if kind_of(value) == "value")
    return [key for key in plain if matcher.find((*path, key)) is None and not matcher.stays((*path, key))]


def settle_dict(container: MutableMapping[Any, Any], gone: list[Any], path: Path, matcher: Matcher) -> None:
    """Make the plain part of the dict at *path* what was saved, once its parts are requested.

    Args:
        gone: `keys_only_here`.
    """
    found = matcher.find(path)
    if found is None or name_of_node(found.node) not in DICTS or not matcher.selects(path):
        return
    if (problem := matcher.hold(container, found.node, path)) is not None:
        matcher.problem(join_name(path), problem)
        return
    if gone:
        matcher.tell(removed(path, gone))
        matcher.later(lambda: [container.pop(key, None) for key in gone])
    if type(container) is OrderedDict and (told := metadata_in(found.node)) is not None:
        metadata = matcher.value((*path, "_metadata"), told)
        matcher.later(lambda: set_metadata(container, metadata()))
    order = list(members_of(found.node))
    matcher.complete(path, found.node, set(container), lambda key, value: container.__setitem__(key, value()))
    matcher.later(lambda: _put_in_order(container, order), last=True)


def _put_in_order(container: MutableMapping[Any, Any], order: list[Any]) -> None:
    if list(container) != order and set(container) == set(order):
        entries = {key: container[key] for key in order}
        container.clear()
        container.update(entries)


def open_target(
    state: Mapping[str, Any],
    stored: Stored,
    *,
    only: Sequence[str] | None = None,
    strict: Strict = True,
    rename: Rename | None = None,
    codecs: CodecRegistry | None = None,
    judge_unexpected: bool = True,
    optimizer_state: OptimizerState = "by_optimizer",
) -> LoadTarget:
    """Match a state with a checkpoint; nothing of the state changes.

    Args:
        state: as for saving.
        stored: what the checkpoint offers.
        only: top-level keys, or prefixes of names in the state, at a boundary between parts; None is all.
        strict: raise for every difference but top-level keys that only the checkpoint has; False loads what fits. A
            mapping says it for names of the state and what is in them; what it does not name is strict.
        rename: from a name in the state to its name in the checkpoint; a mapping renames by its longest prefix.
        codecs: the user's classes; None uses those of `aiockpt.register_codec`.
        judge_unexpected: False when other ranks may hold what this state does not: names that only the checkpoint has
            are no difference then; `LoadTarget.unexpected_claimed` has those that would be one.
        optimizer_state: where the state of a parameter is looked for: in the optimizer of the same name, or in any.

    Raises:
        StateMismatchError: they do not fit, and strict; all differences are named.
        UnsupportedStateError: the state has a leaf that cannot be filled, whatever the checkpoint holds.
        ManifestError: the checkpoint's tree of values is damaged.
        UsageError: ``only`` or ``strict`` names nothing, or a codec is not registered.
    """
    matcher = Matcher(
        stored,
        only=only,
        strict=strict,
        rename=rename,
        codecs=codecs or DEFAULT_CODECS,
        judge_unexpected=judge_unexpected,
        optimizers=list(find_optimizers(stored.values)) if optimizer_state == "by_parameter" else None,
    )
    with collector_paused():  # it would walk all of a big process several times, and finds nothing here
        _load_parts(state, (), Index(state), matcher)
        if judge_unexpected and only is None:
            tell_left(matcher)
        return matcher.finish()


def _load_parts(container: Any, path: Path, index: Index, matcher: Matcher, gone: Collection[Any] = ()) -> None:
    """Request each part of a container; *gone* are keys of plain values that will be removed."""
    for key, value in members(container):
        # A part is something that `only` can name also when nothing is in it, as in a module without parameters.
        matcher.selects((*path, key))
        if key not in gone and not (isinstance(container, list) and _stays(value, (*path, key), matcher)):
            _load_part(container, key, (*path, key), index, matcher)


def _stays(value: Any, path: Path, matcher: Matcher) -> bool:
    """Return whether an item of a list was left out when the checkpoint was made; there is nothing at its place then."""
    return matcher.selects(path) and matcher.stays(path, value if isinstance(value, torch.Tensor) else None)


def _load_part(container: Any, key: Any, path: Path, index: Index, matcher: Matcher) -> None:
    value = container[key]
    match kind_of(value):
        case "module":
            load_module(value, path, index.slice_of, matcher)
        case "optimizer":
            load = load_optimizer if matcher.optimizers is None else load_by_parameter
            load(value, path, index, matcher)
        case "tensor":
            _load_tensor(container, key, path, matcher)
        case "container" | "value" if _load_saved_object(container, key, path, matcher):
            pass
        case "container":
            _load_container(container, key, path, index, matcher)
        case "loader":
            _load_loader(value, path, matcher)
        case "per_rank":
            _load_own(value, path, index, matcher)
        case "stateful":
            _load_stateful(value, path, matcher)
        case "value":
            _load_value(container, key, path, matcher)


def _load_container(outer: Any, key: Any, path: Path, index: Index, matcher: Matcher) -> None:
    container = outer[key]
    matcher.claim(path)
    if isinstance(container, MutableMapping):
        gone = keys_only_here(container, path, matcher)
        _load_parts(container, path, index, matcher, gone)
        settle_dict(container, gone, path, matcher)
    elif isinstance(container, tuple):
        items = list(container)
        _load_parts(items, path, index, matcher)
        matcher.later(lambda: set_tuple(outer, key, items))
    else:
        _load_parts(container, path, index, matcher)


def _load_tensor(container: Any, key: Any, path: Path, matcher: Matcher) -> None:
    """Load a bare tensor; a number that was saved in its place fits one without axes."""
    found, tensor = matcher.find(path), container[key]
    if found is not None and (is_composite(tensor) or is_composite_node(found.node)):
        load_composite(path, tensor, found.node, matcher)
        matcher.leave(matcher.stored_name(path))
    elif is_composite(tensor):
        matcher.miss(path)
    elif found is None or name_of_node(found.node) in ("tensor", "numpy.ndarray"):
        matcher.want(path, tensor)
    else:
        _load_value(container, key, path, matcher)


def _load_stateful(value: Any, path: Path, matcher: Matcher) -> None:
    """Load an object; the checkpoint may have what its ``state_dict()`` returned, saved as a plain dict."""
    if not matcher.selects_whole(path, "it has its own load_state_dict()"):
        return
    found = matcher.find(path)
    node: Any = None if found is None else found.node
    saved_by = None
    if type(node) is dict and node.get(TAG) == "stateful":
        saved_by, node = node.get("class"), node.get("value")
    elif pairs_of(node) is None:
        matcher.miss(path)
        return
    misfit = scheduler_misfit(value, saved_by, pairs_of(node) or ())
    if misfit is not None:
        matcher.mismatch(path, misfit)
        return
    template = give_state(value) if may_spread() else None
    state = matcher.value(path, node, template, fresh=True)
    tell = partial(_tell_at, path, matcher)
    matcher.hand_over(value, path, partial(take_state, value), lambda: keep_lists(value, state(), tell))


def _tell_at(path: Path, matcher: Matcher, what: str) -> None:
    matcher.tell(f"{join_name(path)}: {what}")


def _find_object(path: Path, kind: str, why_whole: str, matcher: Matcher) -> dict[str, Any] | None:
    """Return the node of an object of *kind* that is to be loaded; None, and a note, where there is none."""
    if not matcher.selects_whole(path, why_whole):
        return None
    node = matcher.find_tagged(path, kind)
    if node is None:
        matcher.miss(path)
    return node


def _load_own(value: Any, path: Path, index: Index, matcher: Matcher) -> None:
    """Load what belongs to this rank: an object, or the value that `per_rank` wraps."""
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
        state, may_refuse = matcher.value(path, found.node), isinstance(holder, OwnOptimizer)
        if reads_data(holder):
            matcher.later(lambda: warn_of_empty_loop(holder, state(), join_name(path)))
        matcher.hand_over(
            holder, path, holder.load_state_dict, state, last=isinstance(holder, RNG), may_refuse=may_refuse
        )
    elif (own := matcher.refill(path, holder, found.node)) is not None:
        matcher.later(lambda: setattr(value, "value", own()))


def _why_none(path: Path, matcher: Matcher) -> str | None:
    """Return why the checkpoint has nothing for this rank at *path*, and a remedy; None if it has nothing for any rank."""
    if matcher.find(path) is None:
        return None
    if matcher.find_tagged(path, "per_rank") is None:
        return "one value for all ranks in the checkpoint; load it without aiockpt.per_rank(...)"
    changed = f" ({matcher.stored.world_changed})" if matcher.stored.world_changed else ""
    return f"this rank has none in the checkpoint{changed}; strict=False keeps what is here, only= leaves it out"


def _derive_random(rng: RNG, path: Path, matcher: Matcher) -> bool:
    """Derive random numbers for a rank that is not in the checkpoint; return whether there is a state to derive from."""
    found = matcher.find_of_another(path)
    if found is None:
        return False
    state = matcher.value(path, found.node)
    matcher.later(
        lambda: rng.load_state_dict(derive_state(state(), matcher.stored.rank, matcher.stored.step)), last=True
    )
    return True


def _load_loader(loader: Loader[Any], path: Path, matcher: Matcher) -> None:
    node = _find_object(path, "loader", "a loader goes on as a whole", matcher)
    if node is None:
        return
    try:
        form, size, readers, shared = (
            node["form"],
            field(node, "size", int),
            field(node, "readers", dict),
            node["shared"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"is not the state of a loader ({error!r})") from error
    if (misfit := loader.misfit(form, size, readers)) is not None:
        matcher.mismatch(path, misfit)
        return
    needed = [str(rank) for rank in loader.needed_ranks(size)]
    value = matcher.value(path, {"shared": shared, "owns": [readers[rank] for rank in needed]})
    matcher.pass_over(path)

    def resume() -> None:
        saved = value()
        loader.resume(saved["shared"], saved["owns"])

    matcher.later(resume)


def _load_value(container: Any, key: Any, path: Path, matcher: Matcher) -> None:
    found = matcher.find(path)
    if found is not None:
        _load_node(container, key, path, found.node, matcher)
    elif matcher.selects_whole(path, "it is one plain value"):
        matcher.miss(path)


def _load_saved_object(container: Any, key: Any, path: Path, matcher: Matcher) -> bool:
    """Load into a dict here what was saved as the object that returns such dicts; return whether that was saved."""
    here = container[key]
    if type(here) not in (dict, OrderedDict):
        return False
    if is_saved_module(here, path, matcher):
        load_saved_module(here, path, matcher, set_part)
        return True
    node = node_for(here, path, matcher)
    if node is None:
        node = (matcher.find_tagged(path, "stateful") or {}).get("value")
    if node is not None and node is not msgspec.UNSET:
        _load_node(container, key, path, node, matcher)
    return node is not None


def _load_node(container: Any, key: Any, path: Path, node: Any, matcher: Matcher) -> None:
    if not matcher.selects_whole(path, "it is one plain value"):
        return
    if not isinstance(container, MutableMapping | list):
        raise UsageError(f"{'.'.join(map(str, path))}: {kind_in_words(container)} cannot be filled; give a dict")
    value = matcher.refill(path, container[key], node)
    if value is not None:
        matcher.later(lambda: set_part(container, key, value))


class TensorRef(msgspec.Struct, frozen=True):
    """Where a tensor was, in values that are read without a state: its name in the checkpoint."""

    name: str


def read_tree(stored: Stored) -> Any:
    """Return the values of a whole checkpoint without objects to fill: nested dicts, with `TensorRef` for tensors.

    Modules become their extra values, optimizers their groups and values, other objects what their ``state_dict()`` was;
    what a codec wrote becomes `Opaque`.

    Raises:
        ManifestError: the tree is damaged.
    """
    decoder = Decoder(None, _Onlooker(stored))
    return decoder.decode(stored.values, ())


class _Onlooker:
    """Reads what objects and frameworks wrote without making tensors."""

    def __init__(self, stored: Stored) -> None:
        self._own = stored.per_rank if isinstance(stored.per_rank, Mapping) else {}

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        match kind:
            case "tensor" | "numpy.ndarray" | "stored" | "numbers":
                return TensorRef(field(node, "name", str))
            case "per_rank":
                return decoder.decode(self._own.get(join_name(path)), path)
            case "stateful":
                return decoder.decode(node["value"], path)
            case "loader":
                return decoder.decode({"shared": node["shared"], "readers": node["readers"]}, path)
            case "module":
                return decoder.decode(node.get("values", {}), path)
            case "optimizer":
                return _read_optimizer(node, path, decoder)
        return read_plain_leaf(kind, node, path, decoder)


def _read_optimizer(node: Mapping[str, Any], path: Path, decoder: Decoder) -> dict[str, Any]:
    saved = read_node(node, path)
    groups = [
        {**{key: decoder.decode(value, path) for key, value in values.items()}, "params": members}
        for values, members in zip(saved.groups, saved.members, strict=True)
    ]
    state = {
        owner: plain
        for owner, entry in saved.state.items()
        if (plain := {key: decoder.decode(node, path) for key, node in entry.items() if not is_tensor_node(node)})
    }
    return {"groups": groups, "state": state}
