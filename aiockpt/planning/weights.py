"""Which part of a checkpoint is its weights, and how is that written as a checkpoint of its own?

Weights are what the modules of a state hold: their tensors, and their values of ``get_extra_state()``. The tree of values
says which names are modules. Guarantees:

- Pure and deterministic: every rank, and every process that takes a dead one's place, plans the same files under the same
  names for the same checkpoint. The attempt's name is derived from that of the whole one, so neither is taken for the
  other.
- What is planned is a checkpoint like any other: its own files and manifest, merged and checked as votes are. It loads into
  bare modules, and `has_weights_only` tells what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from aiockpt.errors import ManifestError, UsageError
from aiockpt.format.checksum import digest128
from aiockpt.format.manifest import FileEntry, Manifest, Receipt, TensorEntry
from aiockpt.format.merge import merge_receipts
from aiockpt.format.names import data_path, join_name, prefixes
from aiockpt.planning.load import Landing
from aiockpt.planning.save import HEADER, PAGE_BYTES, FilePlan, Window, plan_save
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.state.tree import TAG, Node, Path

CONTENT, WEIGHTS = "content", "weights"
"""Member and value in a manifest's ``state`` that mark a checkpoint of weights alone."""


def has_weights_only(manifest: Manifest) -> bool:
    """Say whether a checkpoint is the weights of another one."""
    return manifest.state.get(CONTENT) == WEIGHTS


def weights_attempt(attempt: str) -> str:
    """Return the name of the attempt that holds the weights of *attempt*."""
    return digest128(f"{WEIGHTS}/{attempt}".encode())[-12:]


class WeightsFile(msgspec.Struct, frozen=True):
    """A data file to be made.

    Attributes:
        entry: what the manifest will say of it, but for its sums, which are empty.
        plan: its header and windows; their copies number *origins*.
        origins: (file, first byte) in the whole checkpoint of each run of bytes that goes into it.
    """

    entry: FileEntry
    plan: FilePlan
    origins: tuple[tuple[int, int], ...]

    def landings(self, window: Window) -> dict[int, list[Landing]]:
        """Return what to read from each file of the whole checkpoint into *window*, in order; target 0 is the window."""
        found: dict[int, list[Landing]] = {}
        for copy in window.copies:
            if copy.source != HEADER:
                file, first = self.origins[copy.source]
                start = first + copy.source_offset
                found.setdefault(file, []).append(Landing(start, start + copy.size, 0, copy.window_offset))
        return {file: sorted(some, key=attrgetter("start")) for file, some in found.items()}


class WeightsPlan(msgspec.Struct, frozen=True):
    """The files to be made of one checkpoint, and what each rank's votes for them are, but for the files."""

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
    """Return what to make of a checkpoint to have its weights alone; each rank's from the files that it wrote.

    Args:
        whole: of a whole state, already checked.
        window_bytes: of one read and write; a multiple of the blocks of its files.

    Raises:
        UsageError: no module is in the state, or *whole* is weights alone itself.
        ManifestError: its tree of values is damaged.
    """
    roots: set[str] = set()
    try:
        tree = _keep_modules(whole.state.get("global"), (), roots)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{whole.id}: its tree of values is damaged ({error!r})", key=whole.id) from error
    if has_weights_only(whole) or not roots:
        lacks = "is weights alone itself" if has_weights_only(whole) else "has no module in its state"
        raise UsageError(f"{whole.id} {lacks}: there are no weights to take from it; give the tier content='full'")
    names, alias = _choose_names(whole, roots)
    files: list[WeightsFile] = []
    votes: list[Receipt] = []
    shards = _shards_by_rank(whole, names)
    attempt = weights_attempt(whole.attempt)
    for rank in range(whole.world_size):
        made, tensors = _plan_rank(whole, rank, attempt, shards.get(rank, []), window_bytes, file_bytes)
        files += made
        votes.append(_vote(whole, rank, attempt, tensors, alias if not rank else {}, tree))
    return WeightsPlan(tuple(files), tuple(votes), whole.writer)


def _keep_modules(node: Node, path: Path, roots: set[str]) -> Node | None:
    """Return a tree of values with its modules alone, whose names are added to *roots*; None where it has none."""
    if type(node) is not dict:
        return None
    kind = node.get(TAG)
    if kind == "module":
        roots.add(join_name(path))
        return node
    if kind not in (None, "dict"):
        return None
    children = node.items() if kind is None else node["items"]
    kept = {key: found for key, child in children if (found := _keep_modules(child, (*path, key), roots)) is not None}
    if kind is None or not kept:
        return kept or None
    return {TAG: "dict", "items": list(map(list, kept.items()))}


def _choose_names(whole: Manifest, roots: set[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the new name of each stored tensor that belongs to a module, and the other names of those.

    What a module shares with something else may be stored under the name of that: then the module's is taken.
    """

    def belongs(name: str) -> bool:
        return any(prefix in roots for prefix in prefixes(name))

    names = {name: name for name in whole.tensors if belongs(name)}
    alias: dict[str, str] = {}
    for other, stored in whole.alias.items():
        if belongs(other) and names.setdefault(stored, other) != other:
            alias[other] = names[stored]
    return names, alias


_Origin = tuple[int, int]


def _shards_by_rank(whole: Manifest, names: Mapping[str, str]) -> dict[int, list[tuple[_Origin, TensorShard]]]:
    """Return the pieces of the tensors in *names*, by the rank that wrote them and in the order of its files."""
    found: dict[int, list[tuple[_Origin, TensorShard]]] = {}
    for stored, entry in whole.tensors.items():
        if stored not in names:
            continue
        for piece in entry.pieces:
            box = Box(piece.offsets, piece.sizes)
            shard = TensorShard(name=names[stored], dtype=entry.dtype, shape=entry.shape, boxes=(box,), data=None)
            found.setdefault(whole.files[piece.file].rank, []).append(((piece.file, piece.start), shard))
    for some in found.values():
        some.sort(key=lambda item: item[0])
    return found


def _plan_rank(
    whole: Manifest,
    rank: int,
    attempt: str,
    held: Sequence[tuple[_Origin, TensorShard]],
    window_bytes: int,
    file_bytes: int,
) -> tuple[list[WeightsFile], dict[str, TensorEntry]]:
    """Return the files that are made of what *rank* wrote, and the tensors in them."""
    first = whole.files[held[0][0][0]] if held else None
    block = first.block if first else PAGE_BYTES
    plan = plan_save(
        ShardedState(tuple(shard for _, shard in held), {}, None, None, ""),
        slab_bytes=window_bytes,
        file_bytes=file_bytes,
        payload_alignment=PAGE_BYTES if whole.world_size == 1 else max(PAGE_BYTES, block),
    )
    origins = tuple(origin for origin, _ in held)
    files = []
    for number, file in enumerate(plan.files):
        assert first is not None
        path = data_path(attempt, rank, number)
        entry = FileEntry(path, file.size, rank, first.algo, block, sums="", digest="")
        files.append(WeightsFile(entry, file, origins))
    return files, plan.tensors


def _vote(
    whole: Manifest, rank: int, attempt: str, tensors: dict[str, TensorEntry], alias: dict[str, str], tree: Node
) -> Receipt:
    return Receipt(
        id=whole.id,
        step=whole.step,
        generation=whole.generation,
        sequence=whole.sequence,
        run=whole.run,
        parent=whole.parent,
        attempt=attempt,
        rank=rank,
        world_size=whole.world_size,
        created_ns=whole.created_ns,
        plan_digest="",
        scalars_digest="",
        files=(),
        tensors=tensors,
        alias=alias,
        state=tree,
        metrics=whole.metrics,
        user=whole.user,
    )
