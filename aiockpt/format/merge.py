"""What checkpoint do these votes make? Receipts of all ranks become one manifest (DECISIONS 1, 4, 18).

Guarantees:

- Pure and deterministic: receipts in any order give the same manifest, so that any process may finish a commit.
- Only votes of one attempt, one world and one plan are merged; every rank has voted exactly once.
- A piece that several ranks hold is taken from the lowest of them; what then overlaps or leaves a gap is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from aiockpt.errors import CommitError, ManifestError
from aiockpt.format.manifest import FileEntry, Manifest, Piece, Receipt, TensorEntry
from aiockpt.format.validate import check_manifest

_AGREED = ("id", "step", "attempt", "generation", "sequence", "run", "parent", "world_size")
_SHOWN = 5


def merge_receipts(receipts: Sequence[Receipt], *, writer: str, write_id: str, created_ns: int) -> Manifest:
    """Return the manifest of the attempt that *receipts* voted for, checked by `check_manifest`.

    Args:
        receipts: one of each rank, in any order. Global state, metrics and user data are those of the lowest rank.

    Raises:
        CommitError: the votes do not make a checkpoint; names the ranks and the fact, value or tensor.
    """
    votes = sorted(receipts, key=lambda receipt: receipt.rank)
    _check_ranks(votes)
    for vote in votes[1:]:
        _check_agreement(votes[0], vote)
    first = votes[0]
    manifest = Manifest(
        writer=writer,
        id=first.id,
        step=first.step,
        generation=first.generation,
        sequence=first.sequence,
        run=first.run,
        parent=first.parent,
        attempt=first.attempt,
        write_id=write_id,
        created_ns=created_ns,
        world_size=first.world_size,
        files=_merge_files(votes),
        tensors=_merge_tensors(votes),
        alias=_merge_alias(votes),
        state={
            "global": first.state,
            "per_rank": {str(vote.rank): vote.per_rank for vote in votes if vote.per_rank is not None},
        },
        metrics=first.metrics,
        user=first.user,
    )
    try:
        check_manifest(manifest, manifest.id, manifest.generation)
    except ManifestError as error:
        raise CommitError(f"the receipts of all {len(votes)} ranks do not make a checkpoint: {error}") from error
    return manifest


def _check_ranks(votes: Sequence[Receipt]) -> None:
    if not votes:
        raise CommitError("there are no receipts: no rank has voted")
    step_id, world_size = votes[0].id, votes[0].world_size
    ranks = {vote.rank for vote in votes}
    if len(ranks) < len(votes):
        twice = sorted({one.rank for one, next_one in pairwise(votes) if one.rank == next_one.rank})
        raise CommitError(f"{step_id}: more than one receipt of ranks {twice[:_SHOWN]}")
    if votes[-1].rank >= world_size:
        raise CommitError(f"{step_id}: rank {votes[-1].rank} voted in a world of {world_size}")
    if len(ranks) < world_size:
        missing = list(islice((rank for rank in range(world_size) if rank not in ranks), _SHOWN))
        raise CommitError(f"{step_id}: {world_size - len(ranks)} ranks have not voted, the first of them {missing}")


def _check_agreement(first: Receipt, vote: Receipt) -> None:
    for fact in _AGREED:
        ours, theirs = getattr(first, fact), getattr(vote, fact)
        if ours != theirs:
            raise CommitError(
                f"{first.id}: ranks {first.rank} and {vote.rank} disagree about {fact}: {ours!r} and {theirs!r}; "
                "one of them is not a vote of this attempt. Save again."
            )
    if first.scalars_digest != vote.scalars_digest:
        paths = list(islice(_differences(first.state, vote.state, ""), _SHOWN))
        raise CommitError(
            f"{first.id}: ranks {first.rank} and {vote.rank} disagree about plain values: "
            f"{', '.join(paths) or 'their digests differ'}. Make them equal, or mark what belongs to one rank with "
            "aiockpt.per_rank(...)"
        )


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Yield the paths at which two trees differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            inner = f"{path}.{key}" if path else key
            if key in ours and key in theirs:
                yield from _differences(ours[key], theirs[key], inner)
            else:
                yield f"{inner} (only one of them has it)"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{path}[{index}]")
    elif ours != theirs or type(ours) is not type(theirs):
        yield f"{path or 'everything'} ({ours!r:.40} and {theirs!r:.40})"


def _merge_files(votes: Sequence[Receipt]) -> tuple[FileEntry, ...]:
    for vote in votes:
        for file in vote.files:
            if file.rank != vote.rank:
                raise CommitError(f"{vote.id}: the receipt of rank {vote.rank} claims {file.p!r} of rank {file.rank}")
    return tuple(file for vote in votes for file in vote.files)


def _merge_tensors(votes: Sequence[Receipt]) -> dict[str, TensorEntry]:
    pieces: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Piece]] = {}
    seen: dict[str, tuple[Receipt, TensorEntry]] = {}
    file_base = 0
    for vote in votes:
        for name, entry in vote.tensors.items():
            holder, known = seen.setdefault(name, (vote, entry))
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CommitError(
                    f"{vote.id}: {name!r} is {known.dtype} {known.shape} on rank {holder.rank} and {entry.dtype} "
                    f"{entry.shape} on rank {vote.rank}"
                )
            boxes = pieces.setdefault(name, {})
            for piece in entry.pieces:
                if not 0 <= piece.file < len(vote.files):
                    raise CommitError(f"{vote.id}: rank {vote.rank} places {name!r} in a file that it does not have")
                moved = Piece(piece.file + file_base, piece.start, piece.end, piece.offsets, piece.sizes)
                boxes.setdefault((piece.offsets, piece.sizes), moved)
        file_base += len(vote.files)
    return {
        name: TensorEntry(entry.dtype, entry.shape, tuple(pieces[name].values())) for name, (_, entry) in seen.items()
    }


def _merge_alias(votes: Sequence[Receipt]) -> dict[str, str]:
    alias: dict[str, str] = {}
    for vote in votes:
        for name, target in vote.alias.items():
            if alias.setdefault(name, target) != target:
                raise CommitError(
                    f"{vote.id}: {name!r} is tied to {alias[name]!r} on one rank and to {target!r} on rank {vote.rank}"
                )
    return alias
