"""The merge of votes: receipts of all ranks become one manifest (docs/format.md#the-merge).

Guarantees:

- Pure and deterministic: receipts in any order give the same manifest, so that any process may finish a commit.
- Only votes of one attempt and one world are merged; every rank has voted exactly once. Plans may differ: what counts
  is that the pieces of each tensor are complete. Several votes are united to one, and the manifest is made from that, as it
  is from the only vote of a process that saves alone.
- A piece that several ranks wrote is taken from the lowest of them; pieces that then overlap or leave a gap are refused.
- Replicas that differ between ranks are refused (`check_replicas`).
- Plain values are the union of those of all ranks; ranks must agree on values that several of them have (`unite`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import xxhash
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from aiockpt.errors import CommitError, ManifestError, ReplicasDifferError
from aiockpt.format.document import Memo, collector_paused
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
from aiockpt.format.optimizers import TAG, Conflict, Votes, read_optimizer, unite_optimizers
from aiockpt.format.parts import REQUIRED
from aiockpt.format.pieces import PieceMerge, lay_out
from aiockpt.format.validate import MAX_PIECES, ROW, check_manifest
from aiockpt.units import name_numbers

_AGREED = ("id", "step", "attempt", "generation", "sequence", "run", "parent", "ancestors", "forked_from", "world_size")
_SHOWN = 5
_DTYPE, _SHAPE, _AXES, _OFFSETS = map(attrgetter, ("dtype", "shape", "axes", "offsets"))
_TAKEN_OVER = sorted(
    {*Manifest.__struct_fields__} & {*Receipt.__struct_fields__} - {"format", "requires", "created_ns", "state"}
)
"""The facts of a manifest that are those of the vote that it is made from."""
_MEMO_PIECES = 100_000
"""The most pieces of votes that are kept in memory to be compared with the next ones, and are made at once."""
_merged: Memo[list[tuple[int, int, dict[str, TensorEntry]]], dict[str, TensorEntry]] = Memo()


def merge_receipts(receipts: Sequence[Receipt], *, writer: str, write_id: str, created_ns: int) -> Manifest:
    """Return the manifest of the attempt that *receipts* voted for, checked by `check_manifest`.

    Args:
        receipts: one of each rank, in any order. Metrics and user data are those of the lowest rank.

    Raises:
        CommitError: the votes do not make a checkpoint; names the ranks and the fact, value or tensor.
        ReplicasDifferError: ranks have different values of the same tensors.
    """
    votes = sorted(receipts, key=lambda receipt: receipt.rank)
    _check_ranks(votes)
    with collector_paused():
        vote = _sort_pieces(votes[0]) if len(votes) == 1 else _unite_votes(votes)
        per_rank = {str(vote.rank): vote.per_rank for vote in votes if vote.per_rank is not None}
        facts: dict[str, Any] = {name: getattr(vote, name) for name in _TAKEN_OVER}
        manifest = Manifest(
            **facts,
            writer=writer,
            write_id=write_id,
            created_ns=created_ns,
            finite=are_finite(vote.files),
            requires=_required_for(vote),
            state={"global": vote.state, "per_rank": per_rank},
        )
        try:
            check_manifest(manifest, manifest.id, manifest.generation)
        except ManifestError as error:
            raise CommitError(f"the receipts of all {len(votes)} ranks do not make a checkpoint: {error}") from error
        return manifest


def _required_for(vote: Receipt) -> tuple[str, ...]:
    required = required_for(vote.tensors, vote.left_out)
    many = has_table(vote.tensors) and _count_pieces([vote.tensors], MAX_PIECES) > MAX_PIECES
    return (REQUIRED, *required) if many else required


def _sort_pieces(vote: Receipt) -> Receipt:
    """Return the only vote with the pieces of each tensor by their offsets, so that a load finds its own by bisection."""
    few = min(_MEMO_PIECES, MAX_PIECES)
    if _count_pieces([vote.tensors], few) > few:
        return replace(vote, tensors=_merge_pieces([vote]))
    unsorted = {name: entry for name, entry in vote.tensors.items() if len(entry.pieces) > 1}
    in_order = {
        name: replace(entry, pieces=tuple(sorted(entry.pieces, key=_OFFSETS))) for name, entry in unsorted.items()
    }
    return replace(vote, tensors=vote.tensors | in_order)


def _unite_votes(votes: Sequence[Receipt]) -> Receipt:
    """Return what several ranks have together as one vote: that of the lowest rank, with the content of all."""
    for vote in votes[1:]:
        _check_agreement(votes[0], vote)
    tensors = _merge_tensors(votes)
    alias = _merge_alias(votes, tensors)
    left_out = _merge_left_out(votes, {*tensors, *alias})
    files, values = _merge_files(votes), _merge_values(votes)
    check_replicas(votes)
    return replace(votes[0], tensors=tensors, alias=alias, left_out=left_out, files=files, state=values)


def _check_ranks(votes: Sequence[Receipt]) -> None:
    if not votes:
        raise CommitError("there are no receipts: no rank has voted")
    ranks = [vote.rank for vote in votes]
    # Not a list of `world_size` numbers: a vote may claim any.
    if len(ranks) != votes[0].world_size or ranks != list(range(len(ranks))):
        _refuse_ranks(votes[0].id, votes[0].world_size, ranks)


def _refuse_ranks(step_id: str, world_size: int, ranks: Sequence[int]) -> NoReturn:
    """Say which of the sorted *ranks* have voted twice, are none of this world, or are missing."""
    if twice := sorted({one for one, next_one in pairwise(ranks) if one == next_one}):
        raise CommitError(f"{step_id}: more than one receipt of ranks {twice[:_SHOWN]}")
    if ranks[-1] >= world_size:
        raise CommitError(f"{step_id}: rank {ranks[-1]} voted in a world of {world_size}")
    there = set(ranks)
    missing = list(islice((rank for rank in range(world_size) if rank not in there), _SHOWN))
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
    """Unite the global trees; of ranks with equal digests, whose trees are equal, one is read."""
    # Reversed: the last one set for a digest, which stays, is the lowest rank's.
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
    """Collect the pieces of each tensor; few pieces are reused where the last votes had equal tensors."""
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
    """Return the number of pieces, or any number above *most*: to visit each of ten million costs half a second."""
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
            # Votes before this one may be unread yet: their faults come first, however many are read together.
            merging.read()
            raise
        merging.add(vote)
    if (table := merging.merge(MAX_PIECES)) is None:
        return described.finish(_put_together(votes, described.entries))
    return described.finish(lay_out(described.entries, table, made=len(table) <= min(_MEMO_PIECES, MAX_PIECES)))


def _put_together(votes: Sequence[Receipt], entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of votes whose pieces do not fit a table; `check_manifest` refuses the bad ones by name."""
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
    """The description of each tensor by the first rank that has it, and whether the others agree. Hot, as the merge is.

    The order of the axes in memory is a fact of the whole tensor: where ranks disagree about it, it is left unset.

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
        """Check that *vote* describes its tensors as the others do.

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

    def finish(self, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return *tensors* without the orders of axes that votes disagreed about; all of them were checked."""
        return tensors | {name: replace(tensors[name], axes=UNSET) for name in self._disputed}

    @staticmethod
    def _facts(entries: Mapping[str, TensorEntry]) -> tuple[list[Any], ...]:
        return tuple(list(map(fact, entries.values())) for fact in (_DTYPE, _SHAPE, _AXES))


def _merge_alias(votes: Sequence[Receipt], tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Collect the ties. A name that is tied on one rank and a tensor of its own on another is a tensor."""
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
    """Collect what was left out; a name that one rank left out and another saved counts as saved."""
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


# The digests of replicas in receipts, and their comparison when all ranks have voted (docs/format.md#replicas).
#
# A receipt has a table with 16 bytes for each box of a tensor that its rank and others have: the tensor and the box, and
# the digest of some of its bytes. Guarantees:
#
# - Pure. Ranks are compared box by box, whatever other boxes they have, and whichever rank writes the box.
# - A table has hashes in place of names; some receipt has each name. Each distinct table is read once.


class ReplicaTables(msgspec.Struct, frozen=True):
    """The tables of one receipt: of the tensors that must be equal on all ranks, and of the buffers of modules."""

    replicas: bytes = b""
    buffers: bytes = b""


class ReplicaDifference(msgspec.Struct, frozen=True):
    """A tensor that differs between ranks: the ranks with the *same* values as the lowest rank, and the *others*."""

    name: str
    same: tuple[int, ...]
    others: tuple[int, ...]

    def __str__(self) -> str:
        same, others = (name_numbers("rank", ranks, _SHOWN) for ranks in (self.same, self.others))
        return f"{self.name} ({others} unlike {same})"


def row_of(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return the row of a box, without its digest."""
    box = np.array([*offsets, *sizes], "<u8").tobytes()
    return _hash(name.encode()), _hash(box), 0


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


def check_replicas(votes: Sequence[Receipt]) -> None:
    """Check that the replicas that must be equal on all ranks are.

    Raises:
        ReplicasDifferError: names the tensors and the ranks.
    """
    found = find_differences(votes, "replicas")
    if not found:
        return
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ReplicasDifferError(
        f"{votes[0].id}: the ranks have different values of the same tensors, and a load would return those of one "
        f"rank on all: {'; '.join(map(str, found[:_SHOWN]))}{more}. Nothing was published. What belongs to each rank: "
        "aiockpt.per_rank(…); what is a part of a larger tensor: a DTensor, or aiockpt.Shards(…). If one rank's are meant: "
        'Checkpointer(replicas="first"). See docs/guide/ranks.md#replicas-that-differ',
        tensors=[one.name for one in found],
        ranks=sorted({rank for one in found for rank in one.others}),
    )


def find_differences(votes: Sequence[Receipt], table: Literal["replicas", "buffers"]) -> list[ReplicaDifference]:
    """Return the tensors of one of the tables that differ between ranks, by name."""
    ranks_of: dict[bytes, list[int]] = {}
    for vote in votes:
        if rows := getattr(vote, table):
            ranks_of.setdefault(rows, []).append(vote.rank)
    if len(ranks_of) < 2:
        return []
    tables = [np.frombuffer(rows, ROW) for rows in ranks_of]
    keys = np.concatenate([_keys(rows) for rows in tables])
    digests = np.concatenate([rows["digest"] for rows in tables])
    order = np.lexsort((digests, keys))
    keys, digests = keys[order], digests[order]
    odd = np.unique(keys[1:][(keys[1:] == keys[:-1]) & (digests[1:] != digests[:-1])])
    return _describe(odd, dict(zip(map(tuple, ranks_of.values()), tables, strict=True)), votes) if len(odd) else []


def _keys(rows: NDArray[Any]) -> NDArray[np.uint64]:
    return (rows["name"].astype(np.uint64) << np.uint64(32)) | rows["box"].astype(np.uint64)


def _describe(
    odd: NDArray[np.uint64], tables: Mapping[tuple[int, ...], NDArray[Any]], votes: Sequence[Receipt]
) -> list[ReplicaDifference]:
    """Return the differences: the boxes with the keys *odd*, in *tables* that are of some ranks each."""
    values: dict[int, dict[int, list[int]]] = {}
    for ranks, rows in tables.items():
        keys = _keys(rows)
        some = np.isin(keys, odd)
        for key, digest in zip(keys[some].tolist(), rows["digest"][some].tolist(), strict=True):
            values.setdefault(key, {}).setdefault(digest, []).extend(ranks)
    names = _names_of((key >> 32 for key in values), votes)
    found = set()
    for key, by_digest in values.items():
        same, *others = sorted(map(sorted, by_digest.values()))
        found.add(
            ReplicaDifference(names[key >> 32], tuple(same), tuple(sorted({rank for some in others for rank in some})))
        )
    return sorted(found, key=lambda one: (one.name, one.same))


def _names_of(hashes: Iterable[int], votes: Sequence[Receipt]) -> dict[int, str]:
    """Return the name behind each hash; it is in the receipt of any rank that writes a part of the tensor."""
    wanted = dict.fromkeys(hashes, "a tensor that no receipt names")
    names = {name for vote in votes for name in vote.tensors}
    return wanted | {known: name for name in names if (known := _hash(name.encode())) in wanted}


# The union of the plain values of all ranks: their trees become one, or the differences are named.
#
# Ranks of one job may see different parts of it: stages of a pipeline and groups of experts have other modules, and their
# optimizers other parameters. So a tree is the union of all:
#
# - objects (dicts of any keys, modules) by key, lists of one length by place;
# - optimizers (``{"$":"optimizer"}``) by parameter name (`aiockpt.format.optimizers`);
# - anything else must be equal wherever two ranks have it, type included.
#
# Pure, and linear in the size of all trees; for any JSON it either unites or finds conflicts. A node without the form of
# an optimizer is compared as it is.


_OPEN = (None, "module")
"""Objects of which one rank may have members that another lacks."""
_PAIRED = ("dict", "OrderedDict", "defaultdict")
"""Objects whose ``items`` are pairs of a key and a value, because the keys are not all text."""
_APART = ("items", "metadata")


def unite(votes: Votes) -> tuple[Any, list[Conflict]]:
    """Return the union of the trees of some ranks, and their conflicts.

    Args:
        votes: (rank, tree), at least one; in a conflict the value of the first one is used.
    """
    conflicts: list[Conflict] = []
    return _unite(votes, "", conflicts), conflicts


def _unite(votes: Votes, path: str, conflicts: list[Conflict]) -> Any:
    if len(votes) == 1:
        return votes[0][1]
    nodes = [node for _, node in votes]
    if all(type(node) is dict and node.get(TAG) == nodes[0].get(TAG) for node in nodes):
        return _unite_tagged(votes, nodes[0].get(TAG), path, conflicts)
    if all(type(node) is list and len(node) == len(nodes[0]) for node in nodes):
        return [
            _unite([(rank, node[place]) for rank, node in votes], f"{path}[{place}]", conflicts)
            for place in range(len(nodes[0]))
        ]
    return _agree(votes, path, conflicts)


def _unite_tagged(votes: Votes, tag: Any, path: str, conflicts: list[Conflict]) -> Any:
    if tag == "optimizer":
        optimizers = [(rank, found) for rank, node in votes if (found := read_optimizer(node))]
        if len(optimizers) == len(votes):
            return unite_optimizers(optimizers, path, _unite, conflicts)
    elif tag in _PAIRED and all(_is_paired(node) for _, node in votes):
        return _unite_pairs(votes, path, conflicts)
    if tag in _OPEN or all(node.keys() == votes[0][1].keys() for _, node in votes):
        return _unite_objects(votes, path, conflicts)
    return _agree(votes, path, conflicts)


def _agree(votes: Votes, path: str, conflicts: list[Conflict]) -> Any:
    """Return the first rank's node; the first rank with another one is a conflict."""
    first, ours = votes[0]
    for rank, theirs in votes[1:]:
        if type(theirs) is not type(ours) or theirs != ours:
            conflicts.append(Conflict(path, first, rank, ours, theirs))
            break
    return ours


def _unite_objects(votes: Votes, path: str, conflicts: list[Conflict]) -> dict[str, Any]:
    said: dict[str, list[tuple[int, Any]]] = {}
    for rank, node in votes:
        for key, value in node.items():
            said.setdefault(key, []).append((rank, value))
    return {key: _unite(some, f"{path}.{key}" if path else key, conflicts) for key, some in said.items()}


def _is_paired(node: dict[str, Any]) -> bool:
    items = node.get("items")
    return type(items) is list and all(type(pair) is list and len(pair) == 2 for pair in items)


def _unite_pairs(votes: Votes, path: str, conflicts: list[Conflict]) -> dict[str, Any]:
    said: dict[bytes, tuple[Any, list[tuple[int, Any]]]] = {}
    for rank, node in votes:
        for key, value in node["items"]:
            said.setdefault(msgspec.json.encode(key), (key, []))[1].append((rank, value))
    rest = [(rank, {name: value for name, value in node.items() if name not in _APART}) for rank, node in votes]
    items = [[key, _unite(some, f"{path}[{key!r:.40}]", conflicts)] for key, some in said.values()]
    node = {**_unite_objects(rest, path, conflicts), "items": items}
    with_metadata = [(rank, node["metadata"]) for rank, node in votes if "metadata" in node]
    # Classes put the device of their rank into it, which is no conflict.
    return {**node, "metadata": _unite(with_metadata, path, [])} if with_metadata else node
