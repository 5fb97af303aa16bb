"""The storage writer of ``dcp.save``: each rank's items become a state, which is saved like any other.

DCP's phases map to those of a save: ``write_data`` returns when this rank's files and its vote are durable; ``finish``, on
the coordinator, returns when the checkpoint is committed. DCP's planner has left out replicas; a rank's parts of a tensor
are `aiockpt.Shards`.
"""

from __future__ import annotations

import io
import os
import uuid
from typing import Any

import msgspec
import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from aiockpt.adapters.sharded_tensors import Shards
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.convert.foreign.to_dcp import DCP_NOTE
from aiockpt.errors import CheckpointError, UnsupportedStateError, UsageError
from aiockpt.futures import SaveFuture
from aiockpt.integrations.contract import rank_of, size_of
from aiockpt.integrations.dcp.items import ItemNote, Parts, unpickled, with_lists
from aiockpt.integrations.nested import put
from aiockpt.runtime.world import Ranks, find_ranks
from aiockpt.session.checkpointer import Checkpointer, Place

Identifier = str | os.PathLike[str]


def is_place(checkpoint_id: object) -> bool:
    """Return whether a ``checkpoint_id`` of DCP names a place."""
    return isinstance(checkpoint_id, str | os.PathLike)


class AiockptWriter(StorageWriter):
    """Writes what ``dcp.save`` and ``dcp.async_save`` save: ``storage_writer=AiockptWriter("/runs/7")``.

    One object may save any number of checkpoints, and keeps its staging memory and thread between those of one place. All
    ranks make the same calls, as DCP requires. It can be pickled, as ``async_save`` in a separate process requires.

    Args:
        place: the folder or URL to write to, as for `aiockpt.Checkpointer`. A ``checkpoint_id`` given to ``dcp.save``
            overrides it.
        step: the number of the checkpoint there, an attribute that may be set before each save. Saving a step again makes
            a new generation of it.
        process_group: the ``process_group`` given to ``dcp.save``.
        **options: of `aiockpt.Checkpointer`: ``retention=``, ``limits=``, ``worker=`` …

    Raises: Raised by ``dcp.save``, inside of DCP's ``CheckpointException`` where ranks take part
        CheckpointError: any error of a save; checkpoints that were committed before stay.
    """

    def __init__(
        self,
        place: Place | None = None,
        *,
        step: int = 0,
        process_group: distributed.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._place = place
        self.step = step
        self._group = process_group
        self._options = options
        self._open: Checkpointer | None = None
        self._opened: object = None
        self._save: SaveFuture | None = None
        self._alone = True
        self._coordinates = False
        self._collective = True

    # ------------------------------------------------------------------ what DCP calls, in its order

    def reset(self, checkpoint_id: Identifier | None = None) -> None:
        """Set the place of the next checkpoint."""
        if checkpoint_id is not None:
            self._place = checkpoint_id
        self._save = None

    def storage_meta(self) -> StorageMeta:
        """Return the part of DCP's metadata for the storage."""
        return StorageMeta(checkpoint_id=str(self._place), save_id=str(uuid.uuid4()))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this rank's number; a process that DCP numbers differently than the process group does saves alone."""
        if self._place is None:
            raise UsageError('give a place: AiockptWriter("/runs/7"), or dcp.save(…, checkpoint_id="/runs/7")')
        self._coordinates = is_coordinator
        self._collective = kwargs.get("use_collectives", True)
        self._alone = kwargs.get("rank", 0) != rank_of(self._group)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged; a single plan for a job of several ranks is one of ``no_dist``."""
        size = size_of(self._group)
        if self._collective and len(plans) == 1:
            self._alone = True
        elif self._collective and len(plans) != size:
            raise UsageError(
                f"dcp.save() runs on {len(plans)} ranks, and the group that AiockptWriter knows has {size}: give it the "
                "same process_group="
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Save the items of this rank; return when they and its vote are durable."""
        ckpt = self._checkpointer()
        results: list[WriteResult] = []
        try:
            state = state_of(plan, planner, results, alone=self._alone)
        except Exception as error:
            self._notify_others(ckpt, error)
            raise
        self._save = ckpt.save(self.step, state)
        self._save.written().result()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Return when the checkpoint is committed: durable, and visible to readers."""
        assert self._save is not None
        self._save.result()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Identifier) -> bool:
        """Return whether *checkpoint_id* names a place."""
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The place, as DCP's logs name it."""
        return str(self._place)

    # ------------------------------------------------------------------ ours

    def close(self) -> None:
        """Wait for the writes, and release thread and memory. This also happens at interpreter exit."""
        if self._open is not None:
            ckpt, self._open = self._open, None
            ckpt.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise UsageError("an AiockptWriter with a process_group cannot go to another process; leave it out there")
        return {**vars(self), "_open": None, "_opened": None, "_save": None}

    def _checkpointer(self) -> Checkpointer:
        wanted = (self._place, self._alone)
        if self._open is None or self._opened != wanted:
            self.close()
            ranks = ranks_of(self._group, alone=self._alone)
            assert self._place is not None
            # Failures are raised by write_data and finish, and not again by the next save.
            self._open = Checkpointer(
                self._place, **dict[str, Any](on_error=_already_raised) | self._options, ranks=ranks
            )
            self._opened = wanted
        return self._open

    def _notify_others(self, ckpt: Checkpointer, error: Exception) -> None:
        """End the other ranks' saves now: this rank joins the save with a state that cannot be saved."""
        try:
            ckpt.save(self.step, {"items": _Unresolved(error)})
        except Exception as raised:
            if raised is not error:
                raise raised from error


def _already_raised(error: CheckpointError) -> None:
    """Do nothing: the error was raised already."""


def ranks_of(group: distributed.ProcessGroup | None, *, alone: bool) -> Ranks:
    """Return this process's rank in *group* (None is all ranks); rank 0 of 1 where it saves *alone*."""
    if alone or not (distributed.is_available() and distributed.is_initialized()):
        return Ranks()
    ranks = find_ranks()
    if group is None or ranks.world_size == 1:
        return ranks
    members = distributed.get_process_group_ranks(group)
    if len(members) == 1:
        return Ranks()
    name = "-".join(map(str, members))
    store = distributed_c10d.PrefixStore(f"aiockpt.dcp/{name}", ranks.store)
    return Ranks(members.index(ranks.rank), len(members), store)


class _Unresolved:
    """An item that DCP's planner could not provide."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self._error


def state_of(plan: SavePlan, planner: SavePlanner, results: list[WriteResult], *, alone: bool) -> dict[str, Any]:
    """Return the items of a plan as a state, and add DCP's record of each to *results*."""
    known = paths_of(plan.planner_data)
    note = ItemNote({}, {}, flattened=bool(known))
    state: dict[Any, Any] = {}
    parts: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for item in plan.items:
        name = item.index.fqn
        path = known.get(name, (name,))
        note.paths[name] = list(path)
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            raw = data.getvalue()
            plain, value = unpickled(raw)
            if not plain:
                note.pickled[name] = True
            put(state, path, value if plain else raw)
            results.append(WriteResult(item.index, len(raw), None))
            continue
        assert isinstance(data, torch.Tensor)
        assert item.tensor_data is not None
        if tensor_kind(data).in_parts:
            raise UnsupportedStateError(
                name, "a tensor that is made of others; save it with aiockpt.Checkpointer instead"
            )
        results.append(WriteResult(item.index, data.nbytes, None))
        if item.type == WriteItemType.TENSOR:
            put(state, path, data.detach())
        else:
            shapes[name] = tuple(item.tensor_data.size)
            parts.setdefault(name, []).append((tuple(item.tensor_data.chunk.offsets), data))
    for name, pairs in parts.items():
        put(state, tuple(note.paths[name]), Shards(shapes[name], pairs, dtype=pairs[0][1].dtype))
    return with_lists(state, known.values(), alone=alone) | {DCP_NOTE: msgspec.to_builtins(note)}


def paths_of(planner_data: object) -> dict[str, Parts]:
    """Return the paths by name that DCP's planner keeps; an empty dict for a planner without them."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: tuple(path)
        for name, path in planner_data.items()
        if isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
    }
