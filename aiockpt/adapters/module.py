"""Saving and loading of ``nn.Module``: its parts, their names, and both directions.

A module is saved *directly*: parameters and persistent buffers by their fully qualified names, from their own memory, and
the value of ``get_extra_state()`` as a plain value. A submodule that saves itself (it overrides or hooks ``state_dict()``,
or is TorchScript) is saved by its ``state_dict()``; the rest of the tree is still saved directly. The second half of this
file loads.

Names are those of the bare module: what `DistributedDataParallel` (``module.``) and `torch.compile` (``_orig_mod.``) put
around it, at any depth, is skipped, so that a checkpoint of one loads into the other. The same holds for FSDP1's wrapper
and that of activation checkpoints.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import chain, compress, repeat
from operator import not_
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from aiockpt.adapters.composite_target import ask_new, load_tensor
from aiockpt.adapters.composites import is_composite_node
from aiockpt.adapters.differences import asking
from aiockpt.adapters.dtensors import fsdp1_name, is_own_hook
from aiockpt.adapters.leaves import KeptTensors, Run
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.optimizer_forms import tensor_names
from aiockpt.adapters.stored import is_tensor_node, members_of, metadata_in
from aiockpt.adapters.tensor_kinds import has_own_bytes, tensor_kind
from aiockpt.adapters.tensors import dtype_code, facts_of, lies_at_address, new_tensor, torch_dtype
from aiockpt.adapters.watch import Watch
from aiockpt.errors import kind_in_words
from aiockpt.format.dtypes import same, torch_name
from aiockpt.format.names import join_name, name_within, split_name
from aiockpt.state.tree import METADATA, TAG, Node, Path, metadata_of, refuse, set_metadata

EXTRA = "_extra_state"
PLAIN_VERSION = {"version": 1}
MAX_MODULES_DEPTH = 256
_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
Slices = Callable[[torch.Tensor], FlatRange | None]
"""Returns the range of the original parameter that a tensor holds; None for a whole tensor."""


def wrapped_name(module: nn.Module) -> str | None:
    """Return the name under which a transparent wrapper holds the module it wraps; None when it is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    if (name := fsdp1_name(module)) is not None:
        return name
    if _CHECKPOINT_WRAPPED in module._modules:
        return _CHECKPOINT_WRAPPED
    # By name: the class is in torch._dynamo, which would have to be imported.
    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return "_orig_mod"
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all transparent wrappers."""
    while (inner := wrapped_name(module)) is not None:
        module = getattr(module, inner)
    return module


def walk_modules(module: nn.Module, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    """Yield *module* and each module below it, with its path without wrappers; a shared module once for each path."""
    return ((place, member) for place, member, _ in walk_parts(module, path, lambda member: True))


def walk_parts(
    module: nn.Module, path: Path, is_direct: Callable[[nn.Module], bool]
) -> Iterator[tuple[Path, nn.Module, bool]]:
    """Yield *module* and each module below it, with its path and whether it is direct; do not descend into others."""
    module = unwrap(module)
    if len(path) > MAX_MODULES_DEPTH:
        refuse(path[:8], f"modules nested deeper than {MAX_MODULES_DEPTH} levels (does one contain itself?)")
    direct = is_direct(module)
    yield path, module, direct
    if direct:
        for name, child in module._modules.items():
            if child is not None:
                yield from walk_parts(child, (*path, name), is_direct)


def walk_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of one module, not of its children."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def saves_directly(module: nn.Module) -> bool:
    """Return whether one module is saved by its parameters and buffers alone."""
    cls = type(module)
    hooks = chain(module._state_dict_hooks.values(), module._state_dict_pre_hooks.values())
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and cls.state_dict is nn.Module.state_dict
        and cls._save_to_state_dict is nn.Module._save_to_state_dict
        and all(map(is_own_hook, hooks))
        and "state_dict" not in vars(module)
    )


def loads_directly(module: nn.Module) -> bool:
    """Return whether one module is saved and loaded by its parameters and buffers alone."""
    cls = type(module)
    hooks = chain(module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values())
    return (
        saves_directly(module)
        and cls.load_state_dict is nn.Module.load_state_dict
        # torch's own overrides (normalisation layers) only amend checkpoints of its old versions.
        and cls._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and all(map(is_own_hook, hooks))
        and "load_state_dict" not in vars(module)
    )


class ModulePart:
    """One module of a walked state; see `aiockpt.adapters.native`."""

    def __init__(self, module: nn.Module, path: Path, slices: Slices, plan: KeptTensors) -> None:
        watch = plan.watch
        self._choice = plan.choice
        self._module = module
        self._path = path
        self._extras: list[tuple[Path, nn.Module]] = []
        self._own: list[tuple[Path, nn.Module]] = []
        self._composites: list[tuple[Path, torch.Tensor]] = []
        self._metadata: dict[str, Any] = {}
        for member in module.modules():
            if wrapped_name(member) is not None:
                watch.mapping(member._modules)
        for member_path, member, direct in walk_parts(module, path, saves_directly):
            if not direct:
                self._own.append((member_path, member))
                _watch_names(member, watch)
                _refuse_slices(member, member_path, slices)
                continue
            watch.module(member)
            for key, tensor in walk_tensors(member):
                if plan.keep_chosen((*member_path, key), tensor, slices(tensor)):
                    self._composites.append(((*member_path, key), tensor))
            if has_extra(member) and plan.choice.keeps((*member_path, EXTRA)):
                self._extras.append((member_path, member))
            elif has_extra(member):
                plan.leave_out((*member_path, EXTRA))
            # Versions are for `_load_from_state_dict()`, which is not called for modules that are filled directly.
            if not loads_directly(member):
                self._metadata |= _versions(member, member_path[len(path) :])

    def refresh(self, value: object, run: Run) -> Node:
        """Return the node of the module's values; the walk has kept the tensors of its direct parts."""
        run.same(value, self._module)
        values = {
            below(self._path, (*path, EXTRA)): run.encode(member.get_extra_state(), (*path, EXTRA))
            for path, member in self._extras
        }
        values |= {below(self._path, path): run.encode(tensor, path) for path, tensor in self._composites}
        metadata = dict(self._metadata)
        for path, member in self._own:
            self._refresh_own(member, path, run, values, metadata)
        node: dict[str, Node] = {TAG: "module"}
        if values:
            node["values"] = values
        if metadata:
            node[METADATA] = metadata
        return node

    def _refresh_own(
        self, member: nn.Module, path: Path, run: Run, values: dict[str, Node], metadata: dict[str, Any]
    ) -> None:
        state, versions = own_state(member, path)
        live = _live_parameters(member) if self._choice.by_rule else {}
        buffers = plain_keys(unwrap(member), dict(member.named_buffers(remove_duplicate=False)))
        for key, value in state.items():
            place = (*path, *key.split("."))
            if not self._choice.keeps(place, live.get(key)):
                run.left_out[join_name(place)] = facts_of(value) if isinstance(value, torch.Tensor) else None
            elif has_own_bytes(value):
                run.put(place, value, is_buffer=key in buffers)
            else:
                values[below(self._path, place)] = run.encode(value, place)
        metadata |= {below(self._path, (*path, *split_key(key))): versions[key] for key in versions}


def _live_parameters(member: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live parameters by their keys in ``state_dict()``, which itself contains other tensors for them."""
    live = dict(member.named_parameters(remove_duplicate=False))
    return {plain: live[key] for plain, key in plain_keys(unwrap(member), live).items()}


def _versions(member: nn.Module, relative: Path) -> dict[str, Any]:
    """Return the version metadata for the modules below one that loads itself."""
    return {
        ".".join(map(str, place)): {"version": module._version}
        for place, module in walk_modules(member, relative)
        if getattr(module, "_version", 1) != 1
    }


def _watch_names(member: nn.Module, watch: Watch) -> None:
    """Watch the names of parameters, by which optimizers are saved. Those of TorchScript never change."""
    for below_it in member.modules():
        if not isinstance(below_it, torch.jit.ScriptModule):
            watch.names(below_it)


def _refuse_slices(member: nn.Module, path: Path, slices: Slices) -> None:
    if any(slices(parameter) is not None for parameter in member.parameters()):
        refuse(
            path,
            f"{type(member).__qualname__} has its own state_dict(), and FSDP1 has cut its parameters into slices; use FSDP2",
        )


def has_extra(module: nn.Module) -> bool:
    """Return whether a module has values of its own (``get_extra_state``)."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def below(root: Path, path: Path) -> str:
    """Return the key of what is at *path* in the ``state_dict()`` of the module at *root*."""
    return ".".join(map(str, path[len(root) :]))


def split_key(key: str) -> Path:
    """Return the path that a key of ``state_dict()`` means; that of the module itself is empty."""
    return tuple(key.split(".")) if key else ()


def own_state(module: nn.Module, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ``state_dict()`` of a bare module, by names without wrappers, and its version metadata that is not default.

    Raises:
        UnsupportedStateError: it is not a dict with text keys.
    """
    bare = unwrap(module)
    state: Any = bare.state_dict()
    if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
        refuse(path, f"its state_dict() is {kind_in_words(state)}, not a dict with text as keys")
    plain = plain_keys(bare, state)
    known: Mapping[str, Any] = getattr(state, "_metadata", {})
    versions = {
        name: plain_version(known[key_here])
        for name, key_here in plain_keys(bare, known).items()
        if known[key_here] != PLAIN_VERSION
    }
    return {name: state[key] for name, key in plain.items()}, versions


def plain_version(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the version metadata of a module, as far as JSON can represent it."""
    return {key: value for key, value in notes.items() if isinstance(value, bool | int | str | None)}


def plain_keys(bare: nn.Module, keys: Mapping[str, Any]) -> dict[str, str]:
    """Return name without wrappers → key, for *keys* of a bare module's ``state_dict()``."""
    drop = {
        f"{name}.{inner}".lstrip(".")
        for name, member in bare.named_modules(remove_duplicate=False)
        if (inner := wrapped_name(member)) is not None
    }
    plain = {}
    for key in keys:
        parts = key.split(".")
        kept = [part for place, part in enumerate(parts) if ".".join(parts[: place + 1]) not in drop]
        # A wrapper and the module in it have one name; the inner module is the one that was saved.
        plain[".".join(kept)] = key
    return plain


# Loading of a module: filled directly, or by its own ``load_state_dict()``.
#
# - *Directly*, the rule: each parameter and buffer is filled in place, ``set_extra_state()`` receives the stored value.
# - *Its own way*, for the smallest part of the tree that loads itself (it overrides or hooks ``load_state_dict()``
#   or ``_load_from_state_dict()``, is lazy, or is TorchScript): it receives everything stored below its name, in the stored
#   shapes, as new tensors. So it handles a buffer that grew while training, a layer without a shape yet, and keys that
#   appear only later. If it refuses, a `StateMismatchError` reports that the state is partly overwritten.
#
# A module loads from a saved module and from a saved ``module.state_dict()``, and vice versa.


_WHOLE = "it has its own load_state_dict()"
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_DATA_PARALLEL = "module"
SetItem = Callable[[MutableMapping[str, Any], str, Callable[[], Any]], None]


class SavedModule(msgspec.Struct, frozen=True):
    """The content of the checkpoint for one module.

    Attributes:
        path: of the module in the state.
        name: of the module in the checkpoint.
        keys: key of ``state_dict()`` → the key under which it was saved, where a ``state_dict()`` was saved as a dict.
        values: what is not a tensor, by the key of ``state_dict()``.
        metadata: see `aiockpt.state.tree.METADATA`; None where it was not saved.
    """

    path: Path
    name: str
    keys: Mapping[str, str]
    values: Mapping[str, Node]
    metadata: Mapping[str, Any] | None

    def name_of(self, bare: str) -> str:
        """Return the name in the checkpoint of the leaf with this key of ``state_dict()``."""
        parts = (self.keys.get(bare, bare),) if self.keys else bare.split(".")
        return join_name((*split_name(self.name), *parts))

    def stored_name(self, path: Path, matcher: Matcher) -> str:
        """Return the name in the checkpoint of the leaf at *path* of the state."""
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
    left_out = (other for other in matcher.stored.left_out if other.startswith((f"{name}.", f"{name}[")))
    below_it = (split_name(other)[start:] for other in left_out)
    all_keys = {**saved, **{str(parts[0]): None for parts in below_it if "." in str(parts[0])}}
    if not all_keys:
        return SavedModule(path, name, {}, {}, None)
    keys = {bare_key(key, all_keys): key for key in all_keys if type(key) is str}
    values = {
        bare: saved[key]
        for bare, key in keys.items()
        if key in saved and (not is_tensor_node(saved[key]) or bare.endswith(EXTRA))
    }
    return SavedModule(path, name, keys, values, _versions_of(found.node if found else None, all_keys))


def _versions_of(node: Node, all_keys: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the version metadata of each module in the node of a ``state_dict()``, by names without wrappers."""
    saved = metadata_in(node)
    if saved is None:
        return None
    return {_bare_module(name, all_keys): plain_version(members_of(notes)) for name, notes in members_of(saved).items()}


def _bare_module(name: Any, all_keys: Mapping[str, Any]) -> str:
    """Return the name of a module in ``state_dict()._metadata`` without the parts that wrappers add."""
    return bare_key(f"{name}.".lstrip(".") + EXTRA, all_keys).removesuffix(EXTRA).removesuffix(".")


def bare_key(key: str, all_keys: Mapping[Any, Any]) -> str:
    """Return a key of ``state_dict()`` without the parts that wrappers add."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    wrapped = len(parts) > 1 and parts[0] == _DATA_PARALLEL and all(_is_wrapped(other) for other in all_keys)
    return ".".join(parts[1:] if wrapped else parts)


def _is_wrapped(key: object) -> bool:
    return str(key).startswith((f"{_DATA_PARALLEL}.", f"_orig_mod.{_DATA_PARALLEL}."))


def load_module(module: nn.Module, path: Path, slices: Slices, matcher: Matcher) -> None:
    """Request from *matcher* all that a module holds."""
    matcher.claim(path)
    source = open_source(path, matcher)
    names: list[str] = []
    places: list[tuple[Path, str]] = []
    tensors: list[torch.Tensor] = []
    for member_path, member, direct in walk_parts(module, path, lambda member: _fills_directly(member, slices)):
        if not direct:
            OwnLoad(member, member_path, source, matcher).prepare()
            continue
        name = join_name(member_path)
        for key, tensor in walk_tensors(member):
            names.append(name_within(name, key))
            places.append((member_path, key))
            tensors.append(tensor)
        if has_extra(member):
            _load_extra(member, member_path, source, matcher)
    # The fast path covers most of every module: tensors stored whole, under their own names.
    is_usual = not source.keys and not source.values and all(slices(tensor) is None for tensor in tensors)
    taken = matcher.want_plain(names, tensors) if is_usual else repeat(False)
    for (member_path, key), tensor in compress(zip(places, tensors, strict=True), map(not_, taken)):
        place = (*member_path, key)
        node = source.values.get(below(path, place), msgspec.UNSET)
        stored = source.stored_name(place, matcher) if source.keys or source.values else None
        load_tensor(place, tensor, node, matcher, slices(tensor), stored=stored)


def _fills_directly(member: nn.Module, slices: Slices) -> bool:
    """Return whether a module is filled in place; so is one that loads itself, where this rank has only slices of it."""
    if loads_directly(member):
        return True
    return saves_directly(member) and any(slices(parameter) is not None for parameter in member.parameters())


def _load_extra(member: nn.Module, path: Path, source: SavedModule, matcher: Matcher) -> None:
    name = (*path, EXTRA)
    if not matcher.selects(name):
        return
    node = source.values.get(below(source.path, name))
    # None may be the stored value itself.
    if node is None and below(source.path, name) not in source.values:
        if not matcher.stays(name, stored=source.stored_name(name, matcher)):
            matcher.miss(name)
        return
    matcher.skip(source.stored_name(name, matcher))
    matcher.hand_over(member, path, member.set_extra_state, matcher.values.request(name, node))


class OwnLoad:
    """The prepared load of one module that loads itself: everything stored below its name, by its own keys."""

    def __init__(self, member: nn.Module, path: Path, source: SavedModule, matcher: Matcher) -> None:
        self._bare = unwrap(member)
        self._path = path
        self._source = source
        self._matcher = matcher
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, Callable[[], Any]] = {}

    def prepare(self) -> None:
        """Request everything that is stored of the module."""
        matcher = self._matcher
        if not matcher.selects_whole(self._path, _WHOLE):
            return
        current, versions = own_state(self._bare, self._path)
        values = dict(self._stored_values())
        parts = set(tensor_names(list(values.values())))  # tensors that are parts of values are not keys of their own
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
            matcher.skip(self._source.stored_name(self._leaf(key), matcher))
        for key in current:
            matcher.rewrites(self._leaf(key))
            if key in tensors or key in values or key in stay:
                continue
            # A strict load leaves a missing key to the module: its `load_state_dict()` may refuse it or do without.
            if not matcher.is_strict(self._leaf(key)):
                matcher.miss(self._leaf(key))
        metadata = self._metadata(versions)
        matcher.later(lambda: self._apply(metadata), may_refuse=True)

    def find_renames(self) -> dict[Path, str]:
        """Return the name in the checkpoint of each parameter that the module loads from another key than its own.

        A copy of the module without memory loads stand-ins of the stored tensors; its parameters show where each went.
        (So a parametrization loads what an old ``weight_norm`` saved.) A module that cannot be copied renames nothing.
        """
        current, versions = own_state(self._bare, self._path)
        tensors = dict(self._stored_tensors(current))
        if not current.keys() - tensors.keys() or not tensors.keys() - current.keys():
            return {}
        facts = {key: self._matcher.stored.facts(name) for key, name in tensors.items()}
        made = {key: torch.empty(one[1], dtype=torch_dtype(one[0])) for key, one in facts.items() if one}
        keys = {tensor.data_ptr(): key for key, tensor in made.items() if tensor.numel()}
        own = chain(self._bare.parameters(), self._bare.buffers())
        try:
            trial = copy.deepcopy(self._bare, {id(one): _without_memory(one) for one in own})
            # With ``assign`` the parameters of the copy are the stand-ins themselves, and are recognised by address.
            trial.load_state_dict(_as_state_dict(trial, made, self._metadata(versions)), strict=False, assign=True)
        except Exception:  # noqa: BLE001  a missing key is reported elsewhere; the load itself raises the error
            return {}
        parameters = dict(trial.named_parameters(remove_duplicate=False))
        went = {key: keys.get(parameters[own].data_ptr()) for key, own in plain_keys(trial, parameters).items()}
        return {self._leaf(key): tensors[there] for key, there in went.items() if there not in (None, key)}

    def _ask_value(self, key: str, node: Node, live: Any) -> Callable[[], Any]:
        leaf = self._leaf(key)
        if is_composite_node(node) and isinstance(live, torch.Tensor):
            return ask_new(leaf, live, node, self._matcher) or (lambda: live)
        return self._matcher.values.fresh(leaf, node)

    def _stays(self, key: str, value: Any) -> bool:
        leaf = self._leaf(key)
        tensor = value if isinstance(value, torch.Tensor) else None
        return self._matcher.stays(leaf, tensor, stored=self._source.stored_name(leaf, self._matcher))

    def _current(self, key: str) -> Any:
        """Return the current value of a key that the save left out, so that the module receives all its keys."""
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
        """Request one stored tensor into a new one: on the CPU, or spread like *live* where that is spread in this shape."""
        matcher, leaf = self._matcher, self._leaf(key)
        facts = matcher.stored.facts(name)
        assert facts is not None
        code, shape = facts
        if isinstance(live, torch.Tensor) and not same(dtype_code(live.dtype), code):
            matcher.skip(name)
            there = torch_name(code)
            matcher.problem(join_name(leaf), f"{live.dtype} in the state, torch.{there} in the checkpoint")
            return
        if name not in made:
            like = live if tensor_kind(live).is_spread and tuple(live.shape) == shape else torch.device("cpu")
            dtype = torch_dtype(code)
            made[name] = new_tensor(shape, dtype, like, None, matcher.stored.axes_of(name))
        if matcher.want(leaf, made[name], stored=name):
            self._tensors[key] = made[name]
            if lies_at_address(live) and tuple(live.shape) == shape:  # else the module replaces its memory
                matcher.share(leaf, live, name)

    def _metadata(self, current: Mapping[str, Any]) -> dict[str, Any]:
        """Return the version metadata for `Module._load_from_state_dict`.

        Versions that were not saved default to those of the current classes.
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
    notes = modules | {plain.get(key, key): value for key, value in versions.items()}
    set_metadata(state, {key: dict(value) for key, value in notes.items()})  # torch writes into them
    return state


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _takes_strict(module: nn.Module) -> bool:
    """Return whether ``load_state_dict()`` of a module has the parameter ``strict``."""
    try:
        parameters = inspect.signature(module.load_state_dict).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.name == "strict" or one.kind is one.VAR_KEYWORD for one in parameters)


def load_saved_module(mapping: MutableMapping[str, Any], path: Path, matcher: Matcher, set_item: SetItem) -> None:
    """Fill a ``module.state_dict()``, the dict at *path* of the state, from a saved module (`is_saved_module`).

    Args:
        set_item: sets one plain value of a dict, in place where it can.
    """
    matcher.claim(path)
    source = open_source(path, matcher)
    values = source.values
    for key, value in mapping.items():
        leaf, bare = (*path, key), bare_key(str(key), mapping)
        name = source.name_of(bare)
        if isinstance(value, torch.Tensor):
            load_tensor(leaf, value, values.get(bare, msgspec.UNSET), matcher, stored=name)
        elif bare in values:
            matcher.skip(name)
            if matcher.selects(leaf):
                decode = matcher.values.request(leaf, values[bare], value)
                matcher.later(lambda key=key, decode=decode: set_item(mapping, key, decode))  # type: ignore[misc]
        elif not matcher.stays(leaf, stored=name):
            matcher.miss(leaf)
    known, saved = metadata_of(mapping), source.metadata
    if known is not None and saved and matcher.selects(path):
        own = {_bare_module(name, mapping): name for name in known}
        matcher.later(lambda: known.update({own.get(bare, bare): {**notes} for bare, notes in saved.items()}))


def is_saved_module(mapping: Mapping[Any, Any], path: Path, matcher: Matcher) -> bool:
    """Return whether the dict at *path* of the state was saved as a module, or as the dict of one wrapped otherwise.

    (Where only one of two ``state_dict()``s is of DDP or ``torch.compile``, their keys agree only without the parts that
    wrappers add.)
    """
    if matcher.find_tagged(path, "module") is not None:
        return True
    found = matcher.find(path)
    saved = {} if found is None else members_of(found.node)
    if not mapping or not saved or not all(type(key) is str for key in chain(mapping, saved)):
        return False
    if not mapping.keys().isdisjoint(saved):
        return False
    bare = {bare_key(key, mapping) for key in mapping}
    return not bare.isdisjoint(bare_key(key, saved) for key in saved)
