"""What is there to tell of a committed step? The facts of its newest valid manifest, or why no reader may believe it.

No torch is imported: who only looks (`aiockpt ls`) starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aiockpt.errors import CorruptionError, StorageError
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.discover import StepEntry, newest_manifest
from aiockpt.planning.weights import has_weights_only
from aiockpt.storage.backend import Backend

FOUND_DAMAGED = "a verification found it damaged; `aiockpt verify` says where, and takes this back once it is whole"


class StepInfo(msgspec.Struct, frozen=True):
    """One committed step, as a listing tells it.

    Attributes:
        step, id, generation: which one, and its newest valid generation (of a damaged step: the newest).
        created_ns: when its manifest was written, by the writer's clock; for people.
        parent: the id of the step that its run had loaded, or None.
        bytes, tensor_count: of its data files and in them.
        verified: whether that generation was verified in full after it was written.
        problem: why no reader may believe it, or can read it now; None for a valid one.
        run: which checkpointer saved it.
        weights_only: whether it holds weights alone: thinned, or copied so.
        finite: whether no number in its tensors is NaN or infinite; None where nobody has looked (``screen="finite"``).
        forked_from: place, step id and run of the step of another place that it goes back to (``load(…, fork=…)``).
        newest_generation: above *generation* where newer ones are damaged, and readers fall back.
    """

    step: int
    id: str
    generation: int
    created_ns: int = 0
    parent: str | None = None
    bytes: int = 0
    tensor_count: int = 0
    world_size: int = 1
    verified: bool = False
    metrics: Mapping[str, float | None] = {}
    problem: str | None = None
    run: str = ""
    newest_generation: int = 0
    weights_only: bool = False
    finite: bool | None = None
    forked_from: tuple[str, str, str] | None = None

    def tell_origin(self) -> str:
        """Return in words what the run began from, where that was a step of another place; else nothing."""
        return "" if self.forked_from is None else f"forked from {self.forked_from[0]} {self.forked_from[1]}"


async def look_into(backend: Backend, entry: StepEntry) -> StepInfo:
    """Return what there is to tell of a committed step; one that is damaged, or cannot be read now, has a *problem*."""
    try:
        return tell(await newest_manifest(backend, entry), entry)
    except (CorruptionError, StorageError) as error:
        newest = max(entry.generations, default=0)
        return StepInfo(
            step=entry.step,
            id=entry.id,
            generation=newest,
            parent=entry.head.parent if entry.head else None,
            problem=str(error),
            run=entry.head.run if entry.head else "",
            newest_generation=newest,
        )


def tell(manifest: Manifest, entry: StepEntry) -> StepInfo:
    """Return what the *manifest* says of its step, and the listing of it."""
    return StepInfo(
        step=manifest.step,
        id=manifest.id,
        generation=manifest.generation,
        created_ns=manifest.created_ns,
        parent=manifest.parent,
        bytes=sum(file.size for file in manifest.files),
        tensor_count=len(manifest.tensors),
        world_size=manifest.world_size,
        verified=manifest.generation in entry.verified,
        metrics=dict(manifest.metrics),
        problem=FOUND_DAMAGED if manifest.generation in entry.damaged else None,
        run=manifest.run,
        newest_generation=max((manifest.generation, *entry.generations)),
        weights_only=has_weights_only(manifest),
        finite=None if manifest.finite is msgspec.UNSET else manifest.finite,
        forked_from=None if manifest.forked_from is msgspec.UNSET else manifest.forked_from,
    )
