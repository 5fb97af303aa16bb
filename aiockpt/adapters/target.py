"""Loading of a checkpoint into live objects: match leaf by leaf, fill tensors in place, then apply the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, Literal

import msgspec
import torch

from aiockpt.adapters.composite_target import load_tensor
from aiockpt.adapters.composites import is_composite_node
from aiockpt.adapters.differences import Strict
from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import kind_of, members
from aiockpt.adapters.leaves import LeafReader, read_plain_leaf
from aiockpt.adapters.matcher import LoadTarget, Matcher
from aiockpt.adapters.module import is_saved_module, load_module, load_saved_module
from aiockpt.adapters.objects import load_loader, load_own, load_schedulers, load_stateful
from aiockpt.adapters.optimizer_by_parameter import load_by_parameter, note_unused
from aiockpt.adapters.optimizer_exact import load_exactly
from aiockpt.adapters.optimizer_forms import find_optimizers, read_node
from aiockpt.adapters.optimizer_target import load_optimizer, node_for
from aiockpt.adapters.plain_values import DICTS, name_of_node, removed
from aiockpt.adapters.rename import Rename
from aiockpt.adapters.stored import Stored, is_tensor_node, members_of, metadata_in
from aiockpt.adapters.tensor_kinds import ORDINARY, tensor_kind
from aiockpt.adapters.value_requests import OWN_KINDS, Thunk
from aiockpt.errors import UsageError, kind_in_words
from aiockpt.format.document import collector_paused
from aiockpt.format.names import join_name, name_within
from aiockpt.state.codecs import DEFAULT_CODECS, CodecRegistry, field
from aiockpt.state.tree import SCALARS, Decoder, Path, set_metadata

# Dicts, lists and tuples that are loaded part by part.
#
# - A plain value that only the state has is removed, which is reported; one that only the checkpoint has is added. So the
#   plain part equals the saved one, as for a dict of plain values. (Nothing is added where other ranks may have the value.)
# - Tensors and objects are requested by name: they are never removed, and never made.
# - The items of a tuple cannot be set: where an item is replaced, so is the tuple.


OptimizerState = Literal["by_optimizer", "by_parameter"]


def set_part(container: Any, key: Any, value: Thunk) -> None:
    """Set one part of a container, unless the part was filled in place."""
    new = value()
    if container[key] is not new:
        container[key] = new


def set_tuple(container: Any, key: Any, items: list[Any]) -> None:
    """Replace a tuple one of whose items was replaced."""
    if any(item is not new for item, new in zip(container[key], items, strict=True)):
        container[key] = tuple(items)


def keys_only_here(container: Mapping[Any, Any], path: Path, matcher: Matcher) -> list[Any]:
    """Return the keys of the plain values that the dict at *path* lacks in the checkpoint."""
    found = matcher.find(path)
    if found is None or name_of_node(found.node) not in DICTS or not matcher.selects(path):
        return []
    plain = (key for key, value in container.items() if type(value) not in ORDINARY and kind_of(value) == "value")
    return [key for key in plain if matcher.find((*path, key)) is None and not matcher.stays((*path, key))]


def fill_dict(container: MutableMapping[Any, Any], gone: list[Any], path: Path, matcher: Matcher) -> None:
    """Make the plain part of the dict at *path* equal to the saved one, once its parts are requested.

    Args:
        gone: `keys_only_here`.
    """
    found = matcher.find(path)
    if found is None or name_of_node(found.node) not in DICTS or not matcher.selects(path):
        return
    if (problem := matcher.values.filling.hold(container, found.node, path)) is not None:
        matcher.problem(join_name(path), problem)
        return
    if gone:
        matcher.note(removed(path, gone))
        matcher.later(lambda: [container.pop(key, None) for key in gone])
    if type(container) is OrderedDict and (notes := metadata_in(found.node)) is not None:
        metadata = matcher.values.request((*path, "_metadata"), notes)
        matcher.later(lambda: set_metadata(container, metadata()))
    order = list(members_of(found.node))
    matcher.values.complete(path, found.node, set(container), lambda key, value: container.__setitem__(key, value()))
    # Last: the keys that only the checkpoint has are added by steps that `Matcher.finish` appends to all others.
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
    """Match a state with a checkpoint; the state is not changed.

    Args:
        state: as for saving.
        stored: the content of the checkpoint.
        only: top-level keys, or prefixes of names in the state that end between two parts; None is all.
        strict: raise for every difference but top-level keys that only the checkpoint has; False loads what fits. A
            mapping decides for names of the state and all below them; all others are strict.
        rename: from a name in the state to its name in the checkpoint; a mapping renames by its longest prefix.
        codecs: the user's classes; None uses those of `aiockpt.register_codec`.
        judge_unexpected: False when other ranks may hold parts that this state lacks: names that only the checkpoint has
            are then not differences; `LoadTarget.unexpected_claimed` has those that might be.
        optimizer_state: where the state of a parameter is searched: in the optimizer of the same name, or in all.

    Raises:
        StateMismatchError: there are strict differences; the message lists all of them.
        UnsupportedStateError: the state has a leaf that cannot be filled, whatever the checkpoint holds.
        ManifestError: the checkpoint's tree of values is damaged.
        UsageError: an entry of ``only`` or ``strict`` matches nothing, or a codec is not registered.
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
    with collector_paused():  # it would walk the objects of a big process several times, and free nothing
        _load_parts(state, (), Index(state), matcher)
        if matcher.schedulers:
            load_schedulers(matcher)
        if matcher.optimizers and judge_unexpected and only is None:
            note_unused(matcher)
        return matcher.finish()


def _load_parts(container: Any, path: Path, index: Index, matcher: Matcher, gone: Collection[Any] = ()) -> None:
    """Request each part of a container; *gone* are keys of plain values that will be removed."""
    found = matcher.find(path) if matcher.asks_for_all and isinstance(container, Mapping) else None
    own = {} if found is None else members_of(found.node)
    name = join_name(path)
    plain = [key for key, node in own.items() if is_tensor_node(node) and type(container.get(key)) in ORDINARY]
    taken = matcher.want_plain([name_within(name, key) for key in plain], [container[key] for key in plain])
    done = set(compress(plain, taken))
    for key, value in members(container):
        if key in done:
            continue
        # `only` can name a part even if the part is empty, such as a module without parameters.
        matcher.selects((*path, key))
        # An item of a list that a save left out is null there, and would load as None; a key of a dict is absent.
        if key not in gone and not (isinstance(container, list) and _stays(value, (*path, key), matcher)):
            _load_part(container, key, (*path, key), index, matcher)


def _stays(value: Any, path: Path, matcher: Matcher) -> bool:
    """Return whether the save left out an item of a list, so that the checkpoint has nothing at its place."""
    return matcher.selects(path) and matcher.stays(path, value if isinstance(value, torch.Tensor) else None)


def _load_part(container: Any, key: Any, path: Path, index: Index, matcher: Matcher) -> None:
    value = container[key]
    match kind_of(value):
        case "module":
            load_module(value, path, index.slice_of, matcher)
        case "optimizer":
            if matcher.optimizers is not None:
                load_by_parameter(value, path, index, matcher)
            elif not load_exactly(value, path, index, matcher):
                load_optimizer(value, path, index, matcher)
        case "tensor":
            _load_tensor(container, key, path, matcher)
        case "container" | "value" if _load_saved_object(container, key, path, matcher):
            pass
        case "container":
            _load_container(container, key, path, index, matcher)
        case "loader":
            load_loader(value, path, matcher)
        case "per_rank":
            load_own(value, path, index, matcher)
        case "stateful":
            load_stateful(value, path, matcher)
        case "value":
            _load_value(container, key, path, matcher)


def _load_container(outer: Any, key: Any, path: Path, index: Index, matcher: Matcher) -> None:
    container = outer[key]
    matcher.claim(path)
    if isinstance(container, MutableMapping):
        gone = keys_only_here(container, path, matcher)
        _load_parts(container, path, index, matcher, gone)
        fill_dict(container, gone, path, matcher)
    elif isinstance(container, tuple):
        items = list(container)
        _load_parts(items, path, index, matcher)
        matcher.later(lambda: set_tuple(outer, key, items))
    else:
        _load_parts(container, path, index, matcher)


def _load_tensor(container: Any, key: Any, path: Path, matcher: Matcher) -> None:
    """Load a bare tensor; a 0-d tensor also accepts a saved number."""
    found, tensor = matcher.find(path), container[key]
    node = msgspec.UNSET if found is None else found.node
    if node is not msgspec.UNSET and not tensor_kind(tensor).in_parts and not is_composite_node(node):
        if name_of_node(node) not in ("tensor", "numpy.ndarray"):
            _load_value(container, key, path, matcher)
            return
        node = msgspec.UNSET
    load_tensor(path, tensor, node, matcher)


def _load_value(container: Any, key: Any, path: Path, matcher: Matcher) -> None:
    found = matcher.find(path)
    if found is not None and type(found.node) in SCALARS and type(found.node) is type(container[key]):
        _load_scalar(container, key, path, found.node, matcher)
    elif found is not None:
        _load_node(container, key, path, found.node, matcher)
    elif matcher.selects_whole(path, "it is one plain value"):
        matcher.miss(path)


def _load_scalar(container: Any, key: Any, path: Path, node: Any, matcher: Matcher) -> None:
    """Load a number, a text or None over another of its type: there is nothing to decode, and nothing to fill."""
    if may_be_set(container, path, matcher):
        matcher.skip(matcher.stored_name(path))
        matcher.rewrites(path)
        matcher.later(partial(set_part, container, key, lambda: node))


def may_be_set(container: Any, path: Path, matcher: Matcher) -> bool:
    """Return whether the part at *path* is selected, and can be set in its *container*.

    Raises:
        UsageError: it is selected, and cannot.
    """
    if not matcher.selects_whole(path, "it is one plain value"):
        return False
    if not isinstance(container, MutableMapping | list):
        raise UsageError(f"{'.'.join(map(str, path))}: {kind_in_words(container)} cannot be filled; give a dict")
    return True


def _load_saved_object(container: Any, key: Any, path: Path, matcher: Matcher) -> bool:
    """Load into a dict the state of a saved object whose ``state_dict()`` is such a dict; return whether one was saved."""
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
    value = matcher.values.refill(path, container[key], node) if may_be_set(container, path, matcher) else None
    if value is not None:
        matcher.later(lambda: set_part(container, key, value))


class TensorRef(msgspec.Struct, frozen=True):
    """The name in the checkpoint of a tensor, in its place when values are read without a state."""

    name: str


def read_tree(stored: Stored, read: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return the values of a whole checkpoint without objects to fill: nested dicts, with `TensorRef` for tensors.

    Args:
        read: returns a tensor, for long lists and bytes, which are stored as one; None: they are a `TensorRef`, too.

    Modules become their extra values, optimizers their groups and values, other objects their saved ``state_dict()``; a
    value written by a codec becomes `Opaque`.

    Raises:
        ManifestError: the tree is damaged.
    """
    decoder = Decoder(None, _Untouched(stored, read))
    return decoder.decode(stored.values, ())


class _Untouched:
    """Decodes the nodes of objects and frameworks without making tensors."""

    def __init__(self, stored: Stored, read: Callable[[str], torch.Tensor] | None) -> None:
        self._own = stored.per_rank if isinstance(stored.per_rank, Mapping) else {}
        self._read = read

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        if kind in OWN_KINDS and self._read is not None:
            reader, name = LeafReader(), field(node, "name", str)
            reader.put(name, path, self._read(name))
            return reader.decode(kind, node, path, decoder)
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
