"""How a module gets back what was saved of it: filled directly, or handed to its own ``load_state_dict()``.

- *Directly*, the rule: each parameter and buffer in the memory it is in, ``set_extra_state()`` with the value.
- *Its own way*, for the smallest part of the tree that has a say in loading (it overrides or hooks ``load_state_dict()``
  or ``_load_from_state_dict()``, is lazy, or is TorchScript): it gets all that is stored below its name, in the shapes in
  which it is stored, as new tensors, and decides itself. A buffer that grew while training, a layer that has no shape
  yet and keys that only appear later are thus its business. What it refuses is a `StateMismatchError` that says that the
  state is partly overwritten.

A module loads from what was saved as a module, and from a saved ``module.state_dict()``; and the other way round.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn

from aiockpt.adapters.composite_nodes import is_composite_node
from aiockpt.adapters.composite_target import ask_new, load_composite
from aiockpt.adapters.composites import in_words, is_composite
from aiockpt.adapters.fit import new_tensor
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.module import (
    EXTRA,
    PLAIN_VERSION,
    Slices,
    below,
    has_extra,
    loads_directly,
    own_state,
    plain_keys,
    plain_version,
    saves_directly,
    split_key,
    unwrap,
    walk_parts,
    walk_tensors,
)
from aiockpt.adapters.optimizer_forms import tensor_names
from aiockpt.adapters.refusal import asking
from aiockpt.adapters.stored import is_tensor_node, members_of, metadata_in
from aiockpt.adapters.tensors import dtype_code, is_plain, is_spread
from aiockpt.format.dtypes import torch_name
from aiockpt.format.names import join_name, split_name
from aiockpt.state.tree import METADATA, Node, Path, metadata_of, set_metadata

_WHOLE = "it has its own load_state_dict()"
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_DATA_PARALLEL = "module"
SetItem = Callable[[MutableMapping[str, Any], str, Callable[[], Any]], None]


class SavedModule(msgspec.Struct, frozen=True):
    """What the checkpoint has for one module.

    Attributes:
        path: of the module in the state.
        name: of the module in the checkpoint.
        keys: key of ``state_dict()`` → the key under which it was saved, where a ``state_dict()`` was saved as a dict.
        values: what is no tensor, by the key of ``state_dict()``.
        metadata: see `aiockpt.state.tree.METADATA`; None where it was not saved.
    """

    path: Path
    name: str
    keys: Mapping[str, str]
    values: Mapping[str, Node]
    metadata: Mapping[str, Any] | None

    def name_of(self, bare: str) -> str:
        """Return what the leaf of this key of ``state_dict()`` is called in the checkpoint."""
        parts = (self.keys.get(bare, bare),) if self.keys else bare.split(".")
        return join_name((*split_name(self.name), *parts))

    def stored_name(self, path: Path, matcher: Matcher) -> str:
        """Return what the leaf at *path* of the state is called in the checkpoint."""
        key = self.keys.get(below(self.path, path)) if self.keys else None
        return matcher.stored_name(path) if key is None else join_name((*split_name(self.name), key))


def open_source(path: Path, matcher: Matcher) -> SavedModule:
    name = matcher.stored_name(path)
    node = matcher.find_tagged(path, "module")
    if node is not None:
        return SavedModule(path, name, {}, node.get("values", {}), node.get(METADATA, {}))
    found = matcher.find(path)
    parts = {} if found is None else members_of(found.node)
    saved = {key: node for key, node in parts.items() if type(key) is str}
    start = len(split_name(name))
    below_it = (split_name(other)[start:] for other in matcher.left_out_below(name))
    all_keys = {**saved, **{str(parts[0]): None for parts in below_it if "." in str(parts[0])}}
    if not all_keys:
        return SavedModule(path, name, {}, {}, None)
    keys = {bare_key(key, all_keys): key for key in all_keys if type(key) is str}
    values = {bare: saved[key] for bare, key in keys.items() if key in saved and not is_tensor_node(saved[key])}
    return SavedModule(path, name, keys, values, _versions_of(found.node if found else None, all_keys))


def _versions_of(node: Node, all_keys: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the node of a ``state_dict()`` says of the version of each module, by names without wrappers."""
    saved = metadata_in(node)
    if saved is None:
        return None
    return {_bare_module(name, all_keys): plain_version(members_of(told)) for name, told in members_of(saved).items()}


def _bare_module(name: Any, all_keys: Mapping[str, Any]) -> str:
    """Return the name of a module in ``state_dict()._metadata`` without what wrappers put into it."""
    return bare_key(f"{name}.".lstrip(".") + EXTRA, all_keys).removesuffix(EXTRA).removesuffix(".")


def bare_key(key: str, all_keys: Mapping[Any, Any]) -> str:
    """Return a key of ``state_dict()`` without what wrappers put into it."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    wrapped = len(parts) > 1 and parts[0] == _DATA_PARALLEL and all(_is_wrapped(other) for other in all_keys)
    return ".".join(parts[1:] if wrapped else parts)


def _is_wrapped(key: object) -> bool:
    return str(key).startswith((f"{_DATA_PARALLEL}.", f"_orig_mod.{_DATA_PARALLEL}."))


def load_module(module: nn.Module, path: Path, slices: Slices, matcher: Matcher) -> None:
    """Ask *intake* for all that a module holds."""
    matcher.claim(path)
    source = open_source(path, matcher)
    for member_path, member, direct in walk_parts(module, path, lambda member: _fills_directly(member, slices)):
        if not direct:
            OwnLoad(member, member_path, source, matcher).prepare()
            continue
        for tensor_path, tensor in walk_tensors(member, member_path):
            _load_tensor(tensor, tensor_path, slices(tensor), source, matcher)
        if has_extra(member):
            _load_extra(member, member_path, source, matcher)


def _load_tensor(
    tensor: torch.Tensor, path: Path, flat: FlatRange | None, source: SavedModule, matcher: Matcher
) -> None:
    key = below(source.path, path)
    if key in source.values:
        load_composite(path, tensor, source.values[key], matcher)
        matcher.leave(source.stored_name(path, matcher))
        return
    name = source.stored_name(path, matcher) if source.keys else None
    if not is_composite(tensor):
        matcher.want(path, tensor, flat, stored=name)
    elif matcher.stored.facts(name or matcher.stored_name(path)) is not None:
        matcher.mismatch(path, f"{in_words(tensor)} in the state, an ordinary tensor in the checkpoint")
    elif not matcher.stays(path, tensor, stored=name):
        matcher.miss(path)


def _fills_directly(member: nn.Module, slices: Slices) -> bool:
    """Return whether a module is filled in place: also one with a say in loading of which this rank has slices only."""
    if loads_directly(member):
        return True
    return saves_directly(member) and any(slices(parameter) is not None for parameter in member.parameters())


def _load_extra(member: nn.Module, path: Path, source: SavedModule, matcher: Matcher) -> None:
    name = (*path, EXTRA)
    if not matcher.selects(name):
        return
    node = source.values.get(below(source.path, name))
    if node is None and below(source.path, name) not in source.values:
        if not matcher.stays(name, stored=source.stored_name(name, matcher)):
            matcher.miss(name)
        return
    matcher.leave(source.stored_name(name, matcher))
    matcher.hand_over(member, path, member.set_extra_state, matcher.value(name, node))


class OwnLoad:
    """One module that loads itself, being prepared: what is stored below its name, by the keys it knows."""

    def __init__(self, member: nn.Module, path: Path, source: SavedModule, matcher: Matcher) -> None:
        self._bare = unwrap(member)
        self._path = path
        self._source = source
        self._matcher = matcher
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, Callable[[], Any]] = {}

    def prepare(self) -> None:
        """Ask for all that is stored of it."""
        matcher = self._matcher
        if not matcher.selects_whole(self._path, _WHOLE):
            return
        current, versions = own_state(self._bare, self._path)
        values = dict(self._stored_values())
        parts = set(tensor_names(list(values.values())))  # what values are made of is no key of its own
        tensors = {key: name for key, name in self._stored_tensors(current) if name not in parts}
        stay = [key for key in current if key not in tensors and key not in values and self._stays(key, current[key])]
        if current and len(stay) == len(current):
            return
        if current and not tensors and not values:
            for key in current:
                if key not in stay:
                    matcher.miss(self._leaf(key))
            return
        self._values |= {key: partial(self._current, key) for key in stay}
        made: dict[str, torch.Tensor] = {}
        for key, name in tensors.items():
            self._want(key, name, current.get(key), made)
        for key, node in values.items():
            self._values[key] = self._ask_value(key, node, current.get(key))
            matcher.leave(self._source.stored_name(self._leaf(key), matcher))
        for key in current:
            matcher.rewrites(self._leaf(key))
            if key in tensors or key in values or key in stay:
                continue
            if not matcher.is_strict(self._leaf(key)):
                matcher.miss(self._leaf(key))
        metadata = self._metadata(versions)
        matcher.later(lambda: self._apply(metadata), may_refuse=True)

    def find_renames(self) -> dict[Path, str]:
        """Return the name in the checkpoint of each parameter that the module takes from another key than its own.

        A copy of the module without memory loads stand-ins of what is stored, and is asked where they went. (What an
        old ``weight_norm`` saved, the parametrization takes so.) A module that cannot be copied renames nothing.
        """
        current, versions = own_state(self._bare, self._path)
        tensors = dict(self._stored_tensors(current))
        if not current.keys() - tensors.keys() or not tensors.keys() - current.keys():
            return {}
        facts = {key: self._matcher.stored.facts(name) for key, name in tensors.items()}
        made = {key: torch.empty(one[1], dtype=getattr(torch, torch_name(one[0]))) for key, one in facts.items() if one}
        keys = {tensor.data_ptr(): key for key, tensor in made.items() if tensor.numel()}
        own = chain(self._bare.parameters(), self._bare.buffers())
        try:
            trial = copy.deepcopy(self._bare, {id(one): _without_memory(one) for one in own})
            trial.load_state_dict(_as_state_dict(trial, made, self._metadata(versions)), strict=False, assign=True)
        except Exception:  # noqa: BLE001  what is not known is told as missing; the load itself raises what is wrong
            return {}
        parameters = dict(trial.named_parameters(remove_duplicate=False))
        went = {key: keys.get(parameters[own].data_ptr()) for key, own in plain_keys(trial, parameters).items()}
        return {self._leaf(key): tensors[there] for key, there in went.items() if there not in (None, key)}

    def _ask_value(self, key: str, node: Node, live: Any) -> Callable[[], Any]:
        leaf = self._leaf(key)
        if is_composite_node(node) and isinstance(live, torch.Tensor):
            return ask_new(leaf, live, node, self._matcher) or (lambda: live)
        return self._matcher.value(leaf, node, fresh=True)

    def _stays(self, key: str, value: Any) -> bool:
        leaf = self._leaf(key)
        tensor = value if isinstance(value, torch.Tensor) else None
        return self._matcher.stays(leaf, tensor, stored=self._source.stored_name(leaf, self._matcher))

    def _current(self, key: str) -> Any:
        """Return what is there now of what was left out, so that the module gets all its keys."""
        return own_state(self._bare, self._path)[0][key]

    def _leaf(self, key: str) -> Path:
        return (*self._path, *key.split("."))

    def _stored_tensors(self, current: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the key and the name in the checkpoint of each tensor that is stored below the module's name."""
        matcher, source = self._matcher, self._source
        prefix = below(source.path, self._path)
        if source.keys:
            for bare in source.keys:
                key = bare.removeprefix(f"{prefix}.") if prefix else bare
                name = source.stored_name((*source.path, *bare.split(".")), matcher)
                if (key != bare or not prefix) and matcher.stored.facts(name) is not None:
                    yield key, name
            return
        renamed = {matcher.stored_name(self._leaf(key)): key for key in current}
        root = matcher.stored_name(self._path)
        start = len(split_name(root))
        found = {name: ".".join(map(str, split_name(name)[start:])) for name in matcher.names_below(root)}
        for name, key in {**found, **renamed}.items():
            if matcher.stored.facts(name) is not None:
                yield key, name

    def _stored_values(self) -> Iterator[tuple[str, Node]]:
        prefix = below(self._source.path, self._path)
        for key, node in self._source.values.items():
            if not prefix or key.startswith(f"{prefix}."):
                yield key.removeprefix(f"{prefix}.") if prefix else key, node

    def _want(self, key: str, name: str, live: Any, made: dict[str, torch.Tensor]) -> None:
        """Ask for one stored tensor: a new one on the CPU; one that is spread over ranks stays spread like what is here."""
        matcher, leaf = self._matcher, self._leaf(key)
        facts = matcher.stored.facts(name)
        assert facts is not None
        code, shape = facts
        if isinstance(live, torch.Tensor) and dtype_code(live.dtype) != code:
            matcher.leave(name)
            there = torch_name(code)
            matcher.problem(join_name(leaf), f"{live.dtype} in the state, torch.{there} in the checkpoint")
            return
        if name not in made:
            like = live if is_spread(live) and tuple(live.shape) == shape else torch.device("cpu")
            dtype = getattr(torch, torch_name(code))
            made[name] = new_tensor(shape, dtype, like, None, matcher.stored.axes_of(name))
        if matcher.want(leaf, made[name], stored=name):
            self._tensors[key] = made[name]
            if is_plain(live) and tuple(live.shape) == shape:  # else the module gives it other memory
                matcher.share(leaf, live, name)

    def _metadata(self, current: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `Module._load_from_state_dict` is told of the versions that were saved.

        Where they were not saved, they are taken for those of the classes that are here.
        """
        saved, prefix = self._source.metadata, below(self._source.path, self._path)
        if saved is None:
            return dict(current)
        start = len(split_key(prefix))
        mine = {key: split_key(key) for key in saved}
        return {
            ".".join(path[start:]): saved[key]
            for key, path in ((key, tuple(map(str, path))) for key, path in mine.items())
            if path[:start] == split_key(prefix)
        }

    def _apply(self, versions: Mapping[str, Any]) -> None:
        bare = self._bare
        state = _as_state_dict(
            bare, {**self._tensors, **{key: value() for key, value in self._values.items()}}, versions
        )
        how = {"strict": self._matcher.is_strict(self._path)} if _takes_strict(bare) else {}
        with asking(bare, self._path, self._matcher.stored.where):
            bare.load_state_dict(state, **how)


def _as_state_dict(bare: nn.Module, values: Mapping[str, Any], versions: Mapping[str, Any]) -> Any:
    """Return what ``load_state_dict()`` of a *bare* module expects: its own keys, wrappers included, and versions."""
    own_names = plain_keys(bare, dict.fromkeys(bare.state_dict(), None))
    state: Any = OrderedDict((own_names.get(key, key), value) for key, value in values.items())
    modules = {name: PLAIN_VERSION for name, _ in bare.named_modules(remove_duplicate=False)}
    plain = plain_keys(bare, modules)
    told = modules | {plain.get(key, key): value for key, value in versions.items()}
    set_metadata(state, {key: dict(value) for key, value in told.items()})  # torch writes into them
    return state


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _takes_strict(module: nn.Module) -> bool:
    """Return whether ``load_state_dict()`` of a module may be told whether to be strict."""
    try:
        parameters = inspect.signature(module.load_state_dict).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.name == "strict" or one.kind is one.VAR_KEYWORD for one in parameters)


def load_saved_module(mapping: MutableMapping[str, Any], path: Path, matcher: Matcher, set_item: SetItem) -> None:
    """Fill a ``module.state_dict()``, the dict at *path* of the state, from what was saved so (`is_saved_module`).

    Args:
        set_item: sets one plain value of a dict, in place where it can.
    """
    matcher.claim(path)
    source = open_source(path, matcher)
    values = source.values
    for key, value in mapping.items():
        leaf, bare = (*path, key), bare_key(str(key), mapping)
        name = source.name_of(bare)
        if bare in values and isinstance(value, torch.Tensor):
            load_composite(leaf, value, values[bare], matcher)
        elif bare in values and matcher.selects(leaf):
            decode = matcher.value(leaf, values[bare], value)
            matcher.later(lambda key=key, decode=decode: set_item(mapping, key, decode))  # type: ignore[misc]
        elif bare not in values and isinstance(value, torch.Tensor):
            matcher.want(leaf, value, stored=name)
        elif bare not in values and not matcher.stays(leaf, stored=name):
            matcher.miss(leaf)
        if bare in values and source.keys:
            matcher.leave(name)
    known, saved = metadata_of(mapping), source.metadata
    if known is not None and saved and matcher.selects(path):
        own = {_bare_module(name, mapping): name for name in known}
        matcher.later(lambda: known.update({own.get(bare, bare): {**told} for bare, told in saved.items()}))


def is_saved_module(mapping: Mapping[Any, Any], path: Path, matcher: Matcher) -> bool:
    """Return whether the dict at *path* of the state was saved as a module, or as the dict of one wrapped otherwise.

    (One of two ``state_dict()``s is of DDP or ``torch.compile``, the other is not: no key is in both, but for what
    wrappers put into them.)
    """
    if matcher.find_tagged(path, "module") is not None:
        return True
    found = matcher.find(path)
    saved = {} if found is None else members_of(found.node)
    if not mapping or not saved or not all(type(key) is str for key in chain(mapping, saved)):
        return False
    bare = {bare_key(key, mapping) for key in mapping}
    return mapping.keys().isdisjoint(saved) and not bare.isdisjoint(bare_key(key, saved) for key in saved)
