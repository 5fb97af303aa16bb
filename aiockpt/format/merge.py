"""The merge of votes: receipts of all ranks become one manifest (docs/format.md#the-merge).

Guarantees:

- Pure and deterministic: receipts in any order give the same manifest, so that any process may finish a commit.
- Only votes of one attempt and one world are merged; every rank has voted exactly once. Plans may differ: what counts
  is that the pieces of each tensor are complete.
- A piece that several ranks wrote is taken from the lowest of them; what then overlaps or leaves a gap is refused.
- Replicas that ranks have differently are refused (`aiockpt.format.replicas`).
- Plain values are the union of what the ranks say; they must agree wherever they say the same (`values`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from aiockpt.errors import CommitError, ManifestError
from aiockpt.format.document import collector_paused
from aiockpt.format.manifest import (
    FileEntry,
    LeftOut,
    Manifest,
    Receipt,
    TensorEntry,
    are_finite,
    has_table,
    required_for,
)
from aiockpt.format.memo import Memo
from aiockpt.format.parts import REQUIRED
from aiockpt.format.pieces import PieceMerge, lay_out
from aiockpt.format.replicas import check_replicas
from aiockpt.format.validate import MAX_PIECES, check_manifest
from aiockpt.format.values import unite

_AGREED = ("id", "step", "attempt", "generation", "sequence", "run", "parent", "ancestors", "forked_from", "world_size")
_SHOWN = 5
_DTYPE, _SHAPE, _AXES = attrgetter("dtype"), attrgetter("shape"), attrgetter("axes")
_MEMO_PIECES = 100_000
"""Pieces of votes that may be kept in memory for the next ones to be compared with, and are made at once."""
_merged: Memo[list[tuple[int, int, dict[str, TensorEntry]]], dict[str, TensorEntry]] = Memo()


def merge_receipts(receipts: Sequence[Receipt], *, writer: str, write_id: str, created_ns: int) -> Manifest:
    """Return the manifest of the attempt that *receipts* voted for, checked by `check_manifest`.

    Args:
        receipts: one of each rank, in any order. Metrics and user data are those of the lowest rank.

    Raises:
        CommitError: the votes do not make a checkpoint; names the ranks and the fact, value or tensor.
        ReplicasDifferError: ranks have other values of the same tensors.
    """
    votes = sorted(receipts, key=lambda receipt: receipt.rank)
    with collector_paused():
        return _merge(votes, writer, write_id, created_ns)


def _merge(votes: Sequence[Receipt], writer: str, write_id: str, created_ns: int) -> Manifest:
    _check_ranks(votes)
    for vote in votes[1:]:
        _check_agreement(votes[0], vote)
    first = votes[0]
    tensors = _merge_tensors(votes)
    alias = _merge_alias(votes, tensors)
    left_out = _merge_left_out(votes, {*tensors, *alias})
    files = _merge_files(votes)
    values = _merge_values(votes)
    check_replicas(votes)
    manifest = Manifest(
        writer=writer,
        id=first.id,
        step=first.step,
        generation=first.generation,
        sequence=first.sequence,
        run=first.run,
        parent=first.parent,
        ancestors=first.ancestors,
        forked_from=first.forked_from,
        attempt=first.attempt,
        finite=are_finite(files),
        write_id=write_id,
        created_ns=created_ns,
        world_size=first.world_size,
        requires=((REQUIRED,) if has_table(tensors) and _count_pieces([tensors], MAX_PIECES) > MAX_PIECES else ())
        + required_for(tensors, left_out),
        files=files,
        tensors=tensors,
        alias=alias,
        left_out=left_out,
        state={
            "global": values,
            "per_rank": {str(vote.rank): vote.per_rank for vote in votes if vote.per_rank is not None},
        },
        metrics=first.metrics,
        user=first.user,
        config=first.config,
        older=first.older,
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


def _merge_values(votes: Sequence[Receipt]) -> Any:
    """Unite the global trees; ranks with equal digests said the same, so one of them is read."""
    distinct = {vote.scalars_digest: vote for vote in reversed(votes)}
    said = sorted((vote.rank, vote.state) for vote in distinct.values())
    tree, conflicts = unite(said)
    if conflicts:
        more = f" and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
        raise CommitError(
            f"{votes[0].id}: the ranks disagree about plain values: {'; '.join(map(str, conflicts[:_SHOWN]))}{more}. Make "
            "them equal, or mark what belongs to one rank with aiockpt.per_rank(...)"
        )
    return tree


def _merge_files(votes: Sequence[Receipt]) -> tuple[FileEntry, ...]:
    for vote in votes:
        for file in vote.files:
            if file.rank != vote.rank:
                raise CommitError(f"{vote.id}: the receipt of rank {vote.rank} claims {file.p!r} of rank {file.rank}")
    return tuple(file for vote in votes for file in vote.files)


def _merge_tensors(votes: Sequence[Receipt]) -> dict[str, TensorEntry]:
    """Collect the pieces of each tensor, unless there are few and the votes before said the same of their tensors."""
    few = min(_MEMO_PIECES, MAX_PIECES)
    if _count_pieces((vote.tensors for vote in votes), few) > few:
        return _merge_pieces(votes)
    asked = [(vote.rank, len(vote.files), vote.tensors) for vote in votes]
    merged = _merged.recall(asked)
    if merged is None:
        merged = _merge_pieces(votes)
        _merged.remember([(rank, files, dict(tensors)) for rank, files, tensors in asked], merged)
    return dict(merged)


def _count_pieces(holders: Iterable[Mapping[str, TensorEntry]], most: int) -> int:
    """Return how many there are, or some number above *most*: to visit each of ten million costs half a second."""
    count = 0
    for tensors in holders:
        count += sum([len(entry.pieces) for entry in tensors.values()])
        if count > most:
            break
    return count


def _merge_pieces(votes: Sequence[Receipt]) -> dict[str, TensorEntry]:
    """Collect the pieces of each tensor, by their offsets, so that a load finds its own by bisection."""
    described = _Described(votes)
    merging = PieceMerge(described.entries, len(votes[0].tensors), described.alike)
    for vote in votes:
        try:
            described.check(vote)
        except CommitError:
            merging.read()
            raise
        merging.add(vote)
    if (table := merging.merge(MAX_PIECES)) is None:
        return described.settle(_put_together(votes, described.entries))
    return described.settle(lay_out(described.entries, table, made=len(table) <= min(_MEMO_PIECES, MAX_PIECES)))


def _put_together(votes: Sequence[Receipt], entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors with pieces that cannot be in a table, some of which `check_manifest` refuses by name."""
    pieces: dict[str, dict[Any, Any]] = {name: {} for name in entries}
    base = 0
    for vote in votes:
        for name, entry in vote.tensors.items():
            for piece in entry.pieces:
                pieces[name].setdefault((piece.offsets, piece.sizes), replace(piece, file=piece.file + base))
        base += len(vote.files)
    by_offsets = {name: tuple(sorted(some.values(), key=attrgetter("offsets"))) for name, some in pieces.items()}
    return {name: replace(entry, pieces=by_offsets[name]) for name, entry in entries.items()}


class _Described:
    """What the first rank that has a tensor says of it, and whether the others agree. Hot, as the merge is.

    The order of the axes in memory is a fact of the whole tensor: where ranks say different things of it, nothing is said.

    Attributes:
        entries: every tensor, those of the first rank first.
        alike: the ranks that have the tensors of the first one, in its order; in most jobs all of them.
    """

    def __init__(self, votes: Sequence[Receipt]) -> None:
        self._votes = votes
        self._disputed: set[str] = set()
        self.entries: dict[str, TensorEntry] = dict(votes[0].tensors)
        self._first = self._facts(votes[0].tensors)
        names = list(self.entries)
        self.alike = {vote.rank for vote in votes if list(vote.tensors) == names}
        for vote in votes:
            if vote.rank not in self.alike:
                for name, entry in vote.tensors.items():
                    self.entries.setdefault(name, entry)

    def check(self, vote: Receipt) -> None:
        """Return when *vote* describes its tensors as others do.

        Raises:
            CommitError: it does not; names the tensor and both ranks.
        """
        if vote.rank in self.alike and self._facts(vote.tensors) == self._first:
            return
        for name, entry in vote.tensors.items():
            first = self.entries[name]
            if first.dtype != entry.dtype or first.shape != entry.shape:
                rank = next(vote.rank for vote in self._votes if name in vote.tensors)
                raise CommitError(
                    f"{vote.id}: {name!r} is {first.dtype} {first.shape} on rank {rank} and {entry.dtype} {entry.shape} "
                    f"on rank {vote.rank}"
                )
            if first.axes != entry.axes:
                self._disputed.add(name)

    def settle(self, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return *tensors* without the orders of axes that votes disagreed about; all of them were checked."""
        return tensors | {name: replace(tensors[name], axes=UNSET) for name in self._disputed}

    @staticmethod
    def _facts(entries: Mapping[str, TensorEntry]) -> tuple[list[Any], ...]:
        return tuple(list(map(fact, entries.values())) for fact in (_DTYPE, _SHAPE, _AXES))


def _merge_alias(votes: Sequence[Receipt], tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Collect the ties. A name that is a tied one here and a tensor of its own there is a tensor."""
    alias: dict[str, tuple[str, int]] = {}
    for vote in votes:
        for name, target in vote.alias.items():
            if name in tensors:
                continue
            end = _follow(vote.alias, target, tensors)
            known, rank = alias.setdefault(name, (end, vote.rank))
            if known != end:
                raise CommitError(
                    f"{vote.id}: {name!r} is tied to {known!r} on rank {rank} and to {end!r} on rank {vote.rank}"
                )
    ties = {name: target for name, (target, _) in alias.items()}
    return {name: _follow(ties, target, tensors) for name, target in ties.items()}


def _merge_left_out(votes: Sequence[Receipt], stored: Container[str]) -> LeftOut | UnsetType:
    """Collect what was left out; what one rank left out and another saved is there."""
    merged: LeftOut = {}
    for vote in votes:
        for name, facts in (vote.left_out or {}).items():
            if name not in stored and merged.setdefault(name, facts) != facts:
                rank = next(other.rank for other in votes if name in (other.left_out or {}))
                raise CommitError(
                    f"{vote.id}: {name!r} was left out as {_in_words(merged[name])} on rank {rank} and as "
                    f"{_in_words(facts)} on rank {vote.rank}"
                )
    return merged or UNSET


def _in_words(facts: tuple[str, tuple[int, ...]] | None) -> str:
    return "no tensor" if facts is None else f"{facts[0]} {facts[1]}"


def _follow(alias: Mapping[str, str], name: str, tensors: Mapping[str, TensorEntry]) -> str:
    """Return the tensor at the end of a chain of ties, or the name at which the chain breaks or closes."""
    passed = set()
    while name not in tensors and name in alias and name not in passed:
        passed.add(name)
        name = alias[name]
    return name
