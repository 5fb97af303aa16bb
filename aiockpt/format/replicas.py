"""The digests of replicas in receipts, and what they say when all ranks have voted (docs/format.md#replicas).

A receipt has a table of 16 bytes for each box of a tensor that its rank and others have: which box of which tensor, and the
digest of some of its bytes. Guarantees:

- Pure. Ranks are compared box by box, whatever else each of them has, and whichever writes the box.
- A table has no names: each is the hash of one that some receipt has. Each distinct table is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from aiockpt.errors import ReplicasDifferError
from aiockpt.format.manifest import Receipt
from aiockpt.units import name_numbers

ROW = np.dtype([("name", "<u4"), ("box", "<u4"), ("digest", "<u8")])
_SHOWN = 5


class ReplicaTables(msgspec.Struct, frozen=True):
    """The tables of one receipt: of what all ranks must have alike, and of the buffers of modules."""

    replicas: bytes = b""
    buffers: bytes = b""


class ReplicaDifference(msgspec.Struct, frozen=True):
    """A tensor that ranks have differently: those that have the *same* values as the lowest rank, and the *others*."""

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
    """Return when no two ranks have other values of what all must have alike.

    Raises:
        ReplicasDifferError: names the tensors and the ranks.
    """
    found = find_differences(votes, "replicas")
    if not found:
        return
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ReplicasDifferError(
        f"{votes[0].id}: the ranks have other values of the same tensors, of which one rank's would come back on all of "
        f"them: {'; '.join(map(str, found[:_SHOWN]))}{more}. Nothing was published. What belongs to each rank: "
        "aiockpt.per_rank(…); what is a part of a larger tensor: a DTensor, or aiockpt.Shards(…). If one rank's are meant: "
        'Checkpointer(replicas="first"). See docs/guide/ranks.md#replicas-that-differ',
        tensors=[one.name for one in found],
        ranks=sorted({rank for one in found for rank in one.others}),
    )


def find_differences(votes: Sequence[Receipt], table: Literal["replicas", "buffers"]) -> list[ReplicaDifference]:
    """Return the tensors of one of the tables that ranks have differently, by name."""
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
    """Return what differs: the boxes with the keys *odd*, in the *tables* of some ranks each."""
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
    """Return the name behind each hash; each is in the receipt of a rank that writes some of the tensor."""
    wanted = dict.fromkeys(hashes, "a tensor that no receipt names")
    names = {name for vote in votes for name in vote.tensors}
    return wanted | {known: name for name in names if (known := _hash(name.encode())) in wanted}
