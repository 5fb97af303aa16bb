"""The weights of a checkpoint: their selection, and their plan as a checkpoint of their own.

Weights are what the modules of a state hold: their tensors, and their values of ``get_extra_state()``. The tree of values
marks the names that are modules. Guarantees:

- Pure and deterministic: every rank, and every process that replaces a dead one, plans the same files under the same
  names for the same checkpoint. The attempt's name is derived from that of the whole one, so the two are never
  confused.
- The result is a checkpoint like any other: its own files and manifest, merged and checked as votes are. It loads into
  bare modules, and `has_weights_only` recognises it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from aiockpt.errors import ManifestError, UsageError
from aiockpt.format.document import digest128
from aiockpt.format.manifest import FileEntry, LeftOut, Manifest, Receipt, TensorEntry, are_finite, required_for
from aiockpt.format.merge import merge_receipts
from aiockpt.format.names import data_path, prefixes
from aiockpt.planning.modules import Modules
from aiockpt.planning.read_plan import Landing
from aiockpt.planning.write_plan import HEADER, PAGE_BYTES, WEIGHTS, FilePlan, Window, plan_save
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.state.tree import Node

CONTENT = "content"
"""Member in a manifest's ``state`` whose value `WEIGHTS` marks a checkpoint of weights alone."""


def has_weights_only(manifest: Manifest) -> bool:
    """Return whether a checkpoint holds only the weights of another one."""
    return manifest.state.get(CONTENT) == WEIGHTS


def thin_manifest(whole: Manifest, generation: int, write_id: str) -> Manifest:
    """Return the manifest of the weight files of *whole* alone, as a later *generation* of the same attempt.

    Raises:
        UsageError: files hold weights and other things together, or there are no weights.
        ManifestError: its tree of values is damaged.
    """
    weights = _find_weights(whole)
    if whole.parts:
        raise UsageError(f"{whole.id}: its table of pieces lies in blobs, and is kept as it is")
    chosen = {index for index, file in enumerate(whole.files) if file.kind == WEIGHTS}
    tensors = {name: entry for name, entry in whole.tensors.items() if any(p.file in chosen for p in entry.pieces)}
    mixed = any(piece.file not in chosen for entry in tensors.values() for piece in entry.pieces)
    names, _ = _choose_names(whole, weights.roots)
    if mixed or not names.keys() <= tensors.keys():
        raise UsageError(f"{whole.id}: its files hold weights and other things together, so none of them can go")
    place = {index: number for number, index in enumerate(sorted(chosen))}
    files = tuple(whole.files[index] for index in sorted(chosen))

    def renumber(entry: TensorEntry) -> TensorEntry:
        pieces = (msgspec.structs.replace(piece, file=place[piece.file]) for piece in entry.pieces)
        return msgspec.structs.replace(entry, pieces=tuple(pieces))

    return msgspec.structs.replace(
        whole,
        generation=generation,
        write_id=write_id,
        finite=are_finite(files),
        files=files,
        tensors={name: renumber(entry) for name, entry in tensors.items()},
        alias={
            other: kept for other, kept in whole.alias.items() if kept in tensors and _belongs(other, weights.roots)
        },
        left_out=_left_out_of(whole, weights) or msgspec.UNSET,
        state={"global": weights.tree, "per_rank": {}, CONTENT: WEIGHTS},
    )


def weights_attempt(attempt: str) -> str:
    """Return the name of the attempt that holds the weights of *attempt*."""
    return digest128(f"{WEIGHTS}/{attempt}".encode())[-12:]


class WeightsFile(msgspec.Struct, frozen=True):
    """A data file to be written.

    Attributes:
        entry: its entry in the manifest, except for the sums, which are empty.
        plan: its header and windows; the sources of their copies are indices into *origins*.
        origins: (file, first byte) in the whole checkpoint of each run of bytes that goes into it.
    """

    entry: FileEntry
    plan: FilePlan
    origins: tuple[tuple[int, int], ...]

    def landings(self, window: Window) -> dict[int, list[Landing]]:
        """Return the reads from each file of the whole checkpoint into *window*, in order; target 0 is the window."""
        found: dict[int, list[Landing]] = {}
        for copy in window.copies:
            if copy.source != HEADER:
                file, first = self.origins[copy.source]
                start = first + copy.source_offset
                found.setdefault(file, []).append(Landing(start, start + copy.size, 0, copy.window_offset))
        return {file: sorted(some, key=attrgetter("start")) for file, some in found.items()}


class WeightsPlan(msgspec.Struct, frozen=True):
    """The files of the weights of one checkpoint, and each rank's vote for them, except for the file entries."""

    files: tuple[WeightsFile, ...]
    votes: tuple[Receipt, ...]
    writer: str

    def manifest(self, files: Sequence[FileEntry], generation: int, write_id: str) -> Manifest:
        """Return the manifest of the weights, whose *files* are durable.

        Raises:
            CommitError: they do not make a checkpoint.
        """
        made = {rank: tuple(some) for rank, some in groupby(files, key=attrgetter("rank"))}
        votes = [
            msgspec.structs.replace(vote, generation=generation, files=made.get(vote.rank, ())) for vote in self.votes
        ]
        merged = merge_receipts(votes, writer=self.writer, write_id=write_id, created_ns=votes[0].created_ns)
        return msgspec.structs.replace(merged, state={**merged.state, CONTENT: WEIGHTS})


def plan_weights(whole: Manifest, *, window_bytes: int, file_bytes: int) -> WeightsPlan:
    """Return the plan of a checkpoint's weights; those of each rank come from the files that it wrote.

    Args:
        whole: the manifest of a whole state, already checked.
        window_bytes: bytes of one read and write; a multiple of the blocks of its files.

    Raises:
        UsageError: the state has no module, or *whole* is weights alone itself.
        ManifestError: its tree of values is damaged.
    """
    weights = _find_weights(whole)
    names, alias = _choose_names(whole, weights.roots)
    files: list[WeightsFile] = []
    votes: list[Receipt] = []
    shards = _shards_by_rank(whole, names)
    attempt = weights_attempt(whole.attempt)
    left_out = _left_out_of(whole, weights)
    for rank in range(whole.world_size):
        held = _Held(shards.get(rank, []), _not_finite_of(whole, rank, names))
        made, tensors = _plan_rank(whole, rank, attempt, held, weights.tree, window_bytes, file_bytes)
        files += made
        votes.append(_vote(whole, rank, attempt, tensors, alias if not rank else {}, left_out, weights.tree))
    return WeightsPlan(tuple(files), tuple(votes), whole.writer)


def _find_weights(whole: Manifest) -> Modules:
    """Return the modules of a checkpoint."""
    try:
        found = Modules(whole.state.get("global"))
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{whole.id}: its tree of values is damaged ({error!r})", key=whole.id) from error
    if has_weights_only(whole) or not found.roots:
        lacks = "is weights alone itself" if has_weights_only(whole) else "has no module in its state"
        raise UsageError(f"{whole.id} {lacks}: there are no weights to take from it; give the tier content='full'")
    return found


def _left_out_of(whole: Manifest, weights: Modules) -> LeftOut:
    """Return the names in the tree of *weights* that stay as they are in a load."""
    excluded = {name: facts for name, facts in (whole.left_out or {}).items() if _belongs(name, weights.roots)}
    return excluded | dict.fromkeys(weights.left_out)


def _choose_names(whole: Manifest, roots: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the new name of each stored tensor that belongs to a module, and the aliases of those.

    A tensor that a module shares with something else may be stored under the other name: then the module's name is used.
    """
    names = {name: name for name in whole.tensors if _belongs(name, roots)}
    alias: dict[str, str] = {}
    for other, stored in whole.alias.items():
        if _belongs(other, roots) and names.setdefault(stored, other) != other:
            alias[other] = names[stored]
    return names, alias


def _belongs(name: str, roots: Collection[str]) -> bool:
    return any(prefix in roots for prefix in prefixes(name))


_Origin = tuple[int, int]


def _shards_by_rank(whole: Manifest, names: Mapping[str, str]) -> dict[int, list[tuple[_Origin, TensorShard]]]:
    """Return the pieces of the tensors in *names*, by the rank that wrote them and in the order of its files."""
    found: dict[int, list[tuple[_Origin, TensorShard]]] = {}
    for stored, entry in whole.tensors.items():
        if stored not in names:
            continue
        for piece in entry.pieces:
            box = Box(piece.offsets, piece.sizes)
            shard = TensorShard(
                name=names[stored],
                dtype=entry.dtype,
                shape=entry.shape,
                boxes=(box,),
                data=None,
                axes=entry.axes or None,
            )
            found.setdefault(whole.files[piece.file].rank, []).append(((piece.file, piece.start), shard))
    for some in found.values():
        some.sort(key=lambda item: item[0])
    return found


class _Held(msgspec.Struct):
    """The weights that one rank wrote: pieces in the order of its files, and the counts of non-finite numbers."""

    shards: Sequence[tuple[_Origin, TensorShard]]
    not_finite: dict[str, int] | msgspec.UnsetType


def _not_finite_of(whole: Manifest, rank: int, names: Mapping[str, str]) -> dict[str, int] | msgspec.UnsetType:
    """Return the counts of non-finite numbers in the files of *rank*, for the tensors in *names*, by new name."""
    found: Counter[str] = Counter()
    for file in whole.files:
        if file.rank == rank:
            if file.not_finite is msgspec.UNSET:
                return msgspec.UNSET
            found.update({names[name]: count for name, count in file.not_finite.items() if name in names})
    return dict(found)


def _plan_rank(
    whole: Manifest,
    rank: int,
    attempt: str,
    held: _Held,
    tree: Node | None,
    window_bytes: int,
    file_bytes: int,
) -> tuple[list[WeightsFile], dict[str, TensorEntry]]:
    """Return the files that hold the weights written by *rank*, and their tensors; *tree* has the modules."""
    first = whole.files[held.shards[0][0][0]] if held.shards else None
    block = first.block if first else PAGE_BYTES
    plan = plan_save(
        ShardedState(tuple(shard for _, shard in held.shards), {}, tree, None, ""),
        slab_bytes=window_bytes,
        file_bytes=file_bytes,
        # As in a save by so many ranks (`aiockpt.engine.context`).
        payload_alignment=PAGE_BYTES if whole.world_size == 1 else max(PAGE_BYTES, block),
    )
    origins = tuple(origin for origin, _ in held.shards)
    first_file = {name: tensor.pieces[0].file for name, tensor in plan.tensors.items() if tensor.pieces}
    files = []
    for number, file in enumerate(plan.files):
        assert first is not None
        path = data_path(attempt, rank, number)
        entry = FileEntry(path, file.size, rank, first.algo, block, sums="", digest="", kind=WEIGHTS)
        if held.not_finite is not msgspec.UNSET:
            # The counts of all files of the rank were added up, so the sum of a tensor goes to its first file alone.
            own = {name: count for name, count in held.not_finite.items() if first_file.get(name) == number}
            entry = msgspec.structs.replace(entry, not_finite=own)
        files.append(WeightsFile(entry, file, origins))
    return files, plan.tensors


def _vote(
    whole: Manifest,
    rank: int,
    attempt: str,
    tensors: dict[str, TensorEntry],
    alias: dict[str, str],
    left_out: LeftOut,
    tree: Node,
) -> Receipt:
    return Receipt(
        **{name: getattr(whole, name) for name in _AS_BEFORE},
        requires=required_for(tensors, left_out),
        attempt=attempt,
        rank=rank,
        plan_digest="",
        scalars_digest="",
        files=(),
        tensors=tensors,
        alias=alias,
        left_out=left_out or msgspec.UNSET,
        state=tree,
    )


_AS_BEFORE = (
    *("id", "step", "generation", "sequence", "run", "parent", "ancestors", "forked_from", "older"),
    *("world_size", "created_ns", "metrics", "user", "config"),
)
"""What the weights of a step have in common with the whole of it."""
