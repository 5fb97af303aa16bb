"""The storage reader of ``dcp.load``: it turns DCP's plan into a state to fill, box by box.

For DCP every tensor is one chunk. The engine finds the files of its pieces, reads only the requested parts, verifies every
block, and writes it into the tensors that the planner names.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from aiockpt.adapters.sharded_tensors import Shards
from aiockpt.adapters.stored import find_node, is_tensor_node
from aiockpt.adapters.tensors import torch_dtype
from aiockpt.engine.maintenance import Description
from aiockpt.errors import StateMismatchError, UsageError
from aiockpt.format.names import join_name, split_name
from aiockpt.integrations.dcp.items import ItemNote, Parts, pickled, read_note
from aiockpt.integrations.dcp.writer import Identifier, is_place
from aiockpt.runtime.world import Ranks
from aiockpt.session.checkpointer import Checkpointer, Place
from aiockpt.state.tree import TAG

_OF_OBJECTS = {"tensor", "numpy.ndarray", "module", "optimizer", "stateful", "loader", "per_rank"}
"""Kinds of nodes that are not plain values."""


class _Offer(NamedTuple):
    """A checkpoint in DCP's terms."""

    step: int
    metadata: Metadata
    paths: dict[str, Parts]
    pickled: frozenset[str]
    nones: frozenset[str]


class AiockptReader(StorageReader):
    """Reads a checkpoint for ``dcp.load``: ``storage_reader=AiockptReader("/runs/7")``.

    It reads checkpoints of `AiockptWriter` and of ``Checkpointer.save``: each tensor under its dotted name
    (``model.layers.0.weight``), each plain value under its own. Each rank reads for itself, and verifies what it reads.

    Args:
        place: the folder or URL to read from, as for `aiockpt.Checkpointer`. A ``checkpoint_id`` given to ``dcp.load``
            overrides it.
        step: the checkpoint there; None is the newest valid one that the coordinator finds.
        trust_pickle: whether items that are not plain values may be unpickled, which runs code of their author.
        **options: of `aiockpt.Checkpointer`: ``limits=`` …

    Raises: Raised by ``dcp.load``, inside of DCP's ``CheckpointException`` where ranks take part
        NoValidCheckpointError, StepNotFoundError: there is no valid checkpoint, or not that step.
        CorruptionError: a block differs from the saved one; tensors may be partly overwritten.
        UsageError: an item is a pickle, and ``trust_pickle`` was not given.
    """

    def __init__(
        self, place: Place | None = None, *, step: int | None = None, trust_pickle: bool = False, **options: Any
    ) -> None:
        self._place = place
        self._step = step
        self._trust_pickle = trust_pickle
        self._options = options
        self._found: _Offer | None = None

    # ------------------------------------------------------------------ what DCP calls, in its order

    def reset(self, checkpoint_id: Identifier | None = None) -> None:
        """Set the place of the next checkpoint."""
        if checkpoint_id is not None:
            self._place = checkpoint_id
        self._found = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the content of the checkpoint as DCP's metadata."""
        with self._checkpointer() as ckpt:
            self._found = offer(ckpt.describe(self._step).result(), str(self._place))
        return self._found.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the reader needs no setup."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Broadcast the step that the coordinator found to all ranks."""
        for plan in plans:
            plan.storage_data = self._offered().step
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the tensors of a plan, and pass its values to the planner; return when that is done."""
        found, step = self._offered(), plan.storage_data
        if step != found.step:
            raise UsageError(
                f"this rank found step {found.step}, and the coordinator step {step}: give AiockptReader(step=…) while "
                "saves run"
            )
        fetch = _Fetch(found, planner, self._trust_pickle)
        for item in plan.items:
            fetch.ask(item)
        with self._checkpointer() as ckpt:
            state = fetch.state()
            # DCP's flat names are the keys here; extra leaves beside those that are wanted are no difference.
            result = ckpt.load(state, step, strict=False, map=fetch.stored_name).result()
        assert result is not None
        if result.missing or result.differences:
            raise StateMismatchError(result.id, [*result.missing, *result.differences], "DCP's planner asks for it.")
        fetch.hand_over(state)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Identifier) -> bool:
        """Return whether *checkpoint_id* names a place."""
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The place, as DCP's logs name it."""
        return str(self._place)

    # ------------------------------------------------------------------ ours

    def _checkpointer(self) -> Checkpointer:
        if self._place is None:
            raise UsageError('give a place: AiockptReader("/runs/7"), or dcp.load(…, checkpoint_id="/runs/7")')
        return Checkpointer(self._place, **self._options, ranks=Ranks())

    def _offered(self) -> _Offer:
        if self._found is None:
            self.read_metadata()
        assert self._found is not None
        return self._found


class _Fetch:
    """The reads of one rank.

    Args:
        found: the content of the checkpoint.
        planner: provides the tensors to fill, and receives the values.
    """

    def __init__(self, found: _Offer, planner: LoadPlanner, trust_pickle: bool) -> None:
        self._found = found
        self._planner = planner
        self._trust_pickle = trust_pickle
        self._parts: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = defaultdict(list)
        self._tensors: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        self._values: list[ReadItem] = []

    def ask(self, item: ReadItem) -> None:
        """Add an item to the state to load."""
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            if name in self._found.pickled and not self._trust_pickle:
                raise UsageError(
                    f"{name} is no plain value and was saved as a pickle, which may run code: give "
                    "AiockptReader(trust_pickle=True) if you trust whoever wrote it"
                )
            self._values.append(item)
            return
        stored = self._found.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        live = self._planner.resolve_tensor(item)
        target = live.detach()
        if target.dtype != stored.properties.dtype:  # DCP converts where it copies
            target = torch.empty(target.shape, dtype=stored.properties.dtype)
        self._tensors.append((item, live, target))
        self._parts[name].append((tuple(item.storage_offsets), target))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, parts in self._parts.items():
            stored = self._found.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            state[name] = Shards(stored.size, parts, dtype=stored.properties.dtype)
        return state | {item.storage_index.fqn: None for item in self._values}

    def stored_name(self, name: str) -> str:
        """Return the name in the checkpoint of a part of `state`."""
        key, *rest = split_name(name)
        return join_name((*self._found.paths[str(key)], *rest))

    def hand_over(self, state: dict[str, Any]) -> None:
        """Pass the values loaded into *state* to the planner."""
        for item, live, target in self._tensors:
            if target.dtype != live.dtype:
                live.detach().copy_(target)
            self._planner.commit_tensor(item, live)
        for item in self._values:
            name = item.storage_index.fqn
            if state[name] is None and name not in self._found.nones:
                continue  # the control run of `aiockpt prove` loads nothing
            value, is_raw = state[name], name in self._found.pickled
            self._planner.load_bytes(item, io.BytesIO(value) if is_raw else pickled(value))


def offer(description: Description, place: str) -> _Offer:
    """Return the content of a checkpoint in DCP's terms."""
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in description.tensors}
    tensors |= {name: tensors[kept] for name, kept in description.alias.items()}
    note = read_note(description.values)
    if note is None:
        there = [*map(split_name, tensors), *_values(description.values)]
        note = ItemNote({".".join(map(str, path)): list(path) for path in there})
    paths = {name: tuple(path) for name, path in note.paths.items()}
    held: dict[str, Any] = {}
    nones: set[str] = set()
    for name, path in paths.items():
        facts, found = tensors.get(join_name(path)), find_node(description.values, path)
        if facts is None or (found is not None and not is_tensor_node(found.node)):
            held[name] = BytesStorageMetadata()
            if found is not None and found.node is None:
                nones.add(name)
        else:
            held[name] = _one_chunk(*facts)
    metadata = Metadata(
        state_dict_metadata=held,
        planner_data=paths if note.flattened else None,
        storage_meta=StorageMeta(checkpoint_id=place),
    )
    return _Offer(description.info.step, metadata, paths, frozenset(note.pickled), frozenset(nones))


def _one_chunk(dtype: str, shape: tuple[int, ...]) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(dtype)), size, [whole])


def _values(node: Any, path: Parts = ()) -> Iterator[Parts]:
    """Yield the paths of the plain values of a state that lie in dicts."""
    if type(node) is not dict:
        yield path
    elif TAG not in node:
        for key, child in node.items():
            yield from _values(child, (*path, key))
    elif node[TAG] not in _OF_OBJECTS:
        yield path
