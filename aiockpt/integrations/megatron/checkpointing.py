"""``save`` and ``load`` of ``megatron.core.dist_checkpointing``, with its signatures, on this engine.

A folder ``/runs/7/iter_0000100`` is step 100 of the place ``/runs/7``; any other folder is a place of its own, with one
step. Each place has one `aiockpt.Checkpointer` for the lifetime of the program, so that saves run in the background.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch.distributed as dist

import aiockpt
from aiockpt.format.names import join_name
from aiockpt.integrations.contract import ask_first_rank, rank_of, valid_steps
from aiockpt.integrations.megatron.sharded_leaves import GlobalTensors, leaf_name, mapping, path_to_load
from aiockpt.integrations.megatron.stored_names import COMMON, StoredNames

_dicts: Any = import_module("megatron.core.dist_checkpointing.dict_utils")
_state_dicts: Any = import_module("megatron.core.dist_checkpointing.state_dict_utils")
_utils: Any = import_module("megatron.core.dist_checkpointing.utils")
_validation: Any = import_module("megatron.core.dist_checkpointing.validation")

CONTENT = "content_metadata"
"""The key under which Megatron keeps the ``content_metadata`` of ``save``."""
Directory = str | os.PathLike[str]
_COUNTS = "counts of steps"
_CLASS = "__class__"

_logger = logging.getLogger("aiockpt")
_places: dict[str, aiockpt.Checkpointer] = {}


def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: Directory,
    sharded_strategy: object = None,
    common_strategy: object = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
) -> aiockpt.SaveFuture | None:
    """Save a sharded state dict, on all ranks.

    The tensors are copied when this returns. With ``async_sharded_save`` they are written in the background and the future
    is returned; else this returns when the checkpoint is committed.

    Args:
        sharded_state_dict: not changed.
        checkpoint_dir: ``…/iter_0000100`` is step 100 of the place above it.
        sharded_strategy, common_strategy: None; the engine is the strategy.
        validate_access_integrity, preprocess_common_before_consistancy_check: accepted for compatibility, and unused: the
            engine compares the ranks' parts at every save, and the common state is that of rank 0.
        content_metadata: stored beside the common state, and part of the result of `load`.

    Raises:
        UsageError: a strategy was given, or one key names two tensors.
        UnsupportedStateError: a value has no plain form; it is named.
        CheckpointError: an earlier save failed; without ``async_sharded_save``, this one.
    """
    _refuse_strategies(sharded_strategy, common_strategy)
    root, step = locate(checkpoint_dir)
    sharded, _, _ = _state_dicts.load_preprocess(sharded_state_dict)
    sharded, common = _utils.extract_sharded_base(sharded)
    bases = list(_dicts.nested_values(sharded))
    state = GlobalTensors(bases).to_save()
    for base in bases:
        if isinstance(base, mapping.ShardedObject) and mapping.is_main_replica(base.replica_id):
            state[base.unique_key] = encode(base.data)
    if rank_of() == 0:
        state[COMMON] = encode(common | ({} if content_metadata is None else {CONTENT: content_metadata}))
    saving = open_place(root).save(step or 0, state)
    if async_sharded_save:
        return saving
    saving.result()
    return None


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: Directory,
    sharded_strategy: object = None,
    common_strategy: object = None,
    validate_access_integrity: bool = True,
    strict: Any = None,
) -> Any:
    """Load the leaves of a sharded state dict, on all ranks, into its tensors; return the state dict with the loaded values.

    Args:
        sharded_state_dict: not changed, but its tensors are filled in place. Its plain values are used only by
            ``aiockpt prove``, whose control run loads nothing and returns them.
        checkpoint_dir: as for `save`. A folder without a number means the newest valid step of that place.
        sharded_strategy, common_strategy: None.
        validate_access_integrity: accepted for compatibility, and unused.
        strict: a ``StrictHandling`` of Megatron, or its name. By default, a key that the checkpoint lacks is an error.

    Returns:
        The state dict; with ``return_unexpected`` and ``return_all`` also the keys that are not requested, and those that
        the checkpoint lacks.

    Raises:
        StepNotFoundError: there is no such step, or none at all.
        StateMismatchError: keys are missing or have another shape; they are listed, and nothing was overwritten.
        CorruptionError: the step is damaged.
    """
    _refuse_strategies(sharded_strategy, common_strategy)
    root, asked = locate(checkpoint_dir)
    place = open_place(root)
    step = _agree_on_step(place, asked)
    if step is None:
        raise aiockpt.StepNotFoundError(f"there is no checkpoint in {root}")
    saved = place.describe(step).result()
    sharded, own, factories = _state_dicts.load_preprocess(sharded_state_dict)
    sharded, plain = _utils.extract_sharded_base(sharded)
    stored = StoredNames(saved, list(_dicts.nested_values(sharded)))
    flag = _validation.parse_strict_flag(_validation.StrictHandling.ASSUME_OK_UNEXPECTED if strict is None else strict)
    sharded, missing, unexpected = _handle_strictly(flag, sharded, stored, saved.info.id)

    bases = list(_dicts.nested_values(sharded))
    values = _fill(place, step, bases, plain, stored)
    loaded: dict[str, Any] = values[COMMON]
    _dicts.merge(loaded, own)
    _dicts.merge(loaded, _dicts.dict_list_map_outplace(lambda base: _loaded(base, values), sharded))
    loaded = mapping.apply_factory_merges(loaded, factories)
    returns = _validation.StrictHandling.requires_returning_mismatch_keys(flag)
    return (loaded, missing, unexpected) if returns else loaded


def _fill(
    place: aiockpt.Checkpointer, step: int, bases: list[Any], plain: dict[str, Any], stored: StoredNames
) -> dict[str, Any]:
    """Fill the tensors of leaves; return the values of objects by their names, and the plain ones as `COMMON`."""
    wanted = GlobalTensors(bases)
    names = {key: name for key in wanted.shapes if (name := stored.tensor(key)) is not None}
    called = {join_name(path_to_load(key)): name for key, name in names.items()}
    objects = {leaf_name(base): base for base in bases if isinstance(base, mapping.ShardedObject)}
    values = {name: base.data for name, base in objects.items() if not stored.is_derived(base)}
    values |= {} if stored.is_foreign else {COMMON: plain}
    counts = stored.counts(bases)
    called |= {join_name((_COUNTS, str(number))): name for number, name in enumerate(counts)}
    state = wanted.to_load({key: stored.tensors[name] for key, name in names.items()}) | dict.fromkeys(values)
    state |= {_COUNTS: dict(zip(map(str, range(len(counts))), counts.values(), strict=True))} if counts else {}
    # Without it, a strict load would refuse all that the checkpoint holds beside the requested keys.
    only = [*called, *(join_name((value,)) for value in values)]
    place.load(state, step, only=only, map=lambda name: called.get(name, name)).result()
    wanted.finish()
    if stored.is_foreign or state[COMMON] is not None:  # the control run of `aiockpt prove` loads nothing
        values = {name: decode(state[name]) for name in values}
    if stored.is_foreign:
        values[COMMON] = stored.plain(plain)
    return values | {name: stored.derive(base, counts) for name, base in objects.items() if stored.is_derived(base)}


def latest(checkpoint_dir: Directory) -> int | None:
    """Return the newest valid step of a place, the same on all ranks, or None.

    A step that a killed job has written completely is committed first.
    """
    return _agree_on_step(open_place(os.fspath(checkpoint_dir)), None)


def open_place(place: Directory, **options: Any) -> aiockpt.Checkpointer:
    """Return the checkpointer of a place, which the first call creates; all ranks make the same calls.

    Args:
        place: the folder above ``iter_…``, or a URL.
        **options: of `aiockpt.Checkpointer`, at the first call: ``retention=``, ``worker=``, ``snapshot=`` …
    """
    root = os.fspath(place).rstrip("/")
    if root in _places and options:
        raise aiockpt.UsageError(
            f"{root} is open already: call open_place(…, {', '.join(options)}=…) before save and load"
        )
    if root not in _places:
        _places[root] = aiockpt.Checkpointer(root, **options)
    return _places[root]


def wait() -> None:
    """Wait until all saves are committed, and release the places; raise their errors. Interpreter exit also waits."""
    while _places:
        _places.popitem()[1].close()


def locate(checkpoint_dir: Directory) -> tuple[str, int | None]:
    """Return the place of a folder of Megatron, and its step; None for a folder without a number."""
    folder = os.fspath(checkpoint_dir).rstrip("/")
    above, name = posixpath.split(folder)
    numbered = re.fullmatch(r"iter_(\d+)", name)
    return (above or ".", int(numbered[1])) if numbered else (folder, None)


def _loaded(base: Any, values: Mapping[str, Any]) -> Any:
    return values[base.unique_key] if isinstance(base, mapping.ShardedObject) else base.data


def _refuse_strategies(*given: object) -> None:
    if any(one is not None for one in given):
        raise aiockpt.UsageError(
            "sharded_strategy and common_strategy: the engine is the strategy; leave them out, also the wrapper for fully "
            "parallel saves: ranks that hold the same share the writing here without it"
        )


def _agree_on_step(place: aiockpt.Checkpointer, asked: int | None) -> int | None:
    """Return what rank 0 has *asked* for, or the newest valid step."""
    asked = ask_first_rank(lambda: asked)
    return next(iter(valid_steps(place)), None) if asked is None else asked


def _handle_strictly(flag: Any, sharded: Any, stored: StoredNames, step_id: str) -> tuple[Any, set[str], set[str]]:
    """Compare the requested keys with the stored ones, by Megatron's flag; return those that can be loaded.

    In Megatron's terms, *missing* keys are not requested, and *unexpected* keys are not in the checkpoint.
    """
    kinds = _validation.StrictHandling
    asked = list(_dicts.nested_values(sharded))
    unexpected = {leaf_name(base) for base in asked if not stored.has(base)}
    missing: set[str] = set()
    if kinds.requires_global_app_metadata(flag):
        unasked = stored.unasked(asked)
        everyone: list[Any] = [unasked]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, unasked)
        missing = set.intersection(*everyone)
    if flag in (kinds.ASSUME_OK_UNEXPECTED, kinds.RAISE_UNEXPECTED, kinds.RAISE_ALL) and unexpected | missing:
        found = [f"{key}: not in the checkpoint" for key in sorted(unexpected)]
        found += [f"{key}: only in the checkpoint" for key in sorted(missing)]
        raise aiockpt.StateMismatchError(step_id, found, "strict= of load() says what to do with them.")
    if flag in (kinds.LOG_UNEXPECTED, kinds.LOG_ALL) and unexpected | missing:
        _logger.warning(
            "%s: not in the checkpoint, and left as they are: %s; only in the checkpoint: %s",
            step_id,
            sorted(unexpected),
            sorted(missing),
        )
    _, sharded = _dicts.extract_matching_values(sharded, lambda base: leaf_name(base) in unexpected)
    return (sharded, set(), set()) if flag == kinds.IGNORE_ALL else (sharded, missing, unexpected)


# Objects are written as plain values, never as pickles. A save refuses an object without a plain form, and names it;
# `aiockpt.register_codec` adds a plain form for a class.


def encode(value: Any) -> Any:
    """Return *value* with plain forms for objects in Megatron's state dicts: buffers, and its arguments."""
    if type(value) is io.BytesIO:
        return {_CLASS: "io.BytesIO", "bytes": value.getvalue()}
    if type(value) is argparse.Namespace:
        return {_CLASS: "argparse.Namespace", "fields": encode(vars(value))}
    if type(value) is dict:
        return {key: encode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(encode, value))
    return value


def decode(value: Any) -> Any:
    """Return the value that `encode` received."""
    if type(value) is dict and value.get(_CLASS) == "io.BytesIO":
        return io.BytesIO(value["bytes"])
    if type(value) is dict and value.get(_CLASS) == "argparse.Namespace":
        return argparse.Namespace(**decode(value["fields"]))
    if type(value) is dict:
        return {key: decode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(decode, value))
    return value
