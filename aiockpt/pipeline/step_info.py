"""The facts of a committed step: those of its newest valid manifest, or why it cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from aiockpt.errors import CorruptionError, StorageError
from aiockpt.format.manifest import FileEntry, ForkedFrom, Manifest
from aiockpt.pipeline.discover import StepEntry, newest_manifest
from aiockpt.planning.weights import has_weights_only
from aiockpt.storage.backend import Backend

FOUND_DAMAGED = "a verification found it damaged; `aiockpt verify` says where, and takes this back once it is whole"


class StepInfo(msgspec.Struct, frozen=True):
    """One committed step, as a listing shows it.

    Attributes:
        step, id, generation: which one, and its newest valid generation (of a damaged step: the newest).
        created_ns: when its manifest was written, by the writer's clock; for people.
        parent: the id of the step that its run had loaded, or None.
        bytes, tensor_count: the size of its data files, and the tensors in them.
        verified: whether that generation was verified in full after it was written.
        problem: why it must not be used, or cannot be read now; None for a valid one.
        run: which checkpointer saved it.
        weights_only: whether it holds weights alone: thinned, or copied so.
        finite: whether no number in its tensors is NaN or infinite; None where it was not checked (``screen="finite"``).
        forked_from: place, step id and run of the step of another place that it descends from (``load(…, fork=…)``); of a
            foreign checkpoint its address alone.
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

    def describe_origin(self) -> str:
        """Return in words the origin of the run, where that was a step of another place; else ""."""
        return "" if self.forked_from is None else f"forked from {origin_in_words(self.forked_from)}"


def count_not_finite_in(files: Iterable[FileEntry]) -> Counter[str]:
    """Return how many numbers of each tensor in *files* are NaN or infinite, where that was checked."""
    found: Counter[str] = Counter()
    for file in files:
        found.update(file.not_finite or {})
    return found


def origin_in_words(fork: ForkedFrom) -> str:
    """Return the origin of a line of saves as one line for a terminal, whatever characters the address has."""
    said = " ".join(fork[:2]).rstrip()
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in said)


async def read_info(backend: Backend, entry: StepEntry) -> StepInfo:
    """Return the facts of a committed step; one that is damaged, or cannot be read now, has a *problem*."""
    try:
        return info_of(await newest_manifest(backend, entry), entry)
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


def info_of(manifest: Manifest, entry: StepEntry) -> StepInfo:
    """Return the facts of a step from its *manifest* and its listing, *entry*."""
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
