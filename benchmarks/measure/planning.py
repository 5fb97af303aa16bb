"""The cost of planning for many ranks; no process is started for a rank.

For each world: the division of writes (once per structure, on one rank), one rank's own plan, its receipt, the merge of all
receipts, the manifest, and the load plan of one rank of a job with half the ranks. Two ways to shard are shown:

- *FSDP*: every tensor by rows over all ranks. Pieces grow with ranks × tensors, and so does the manifest; beyond 2 million
  they are in columns (`aiockpt.format.parts`).
- *HSDP*: by rows over at most 100 ranks, replicas on the rest. Pieces do not grow any more; replicas are spread.

Seconds are CPU seconds of this process: it is one thread that never waits, so on an idle machine they equal the wall
time, and other programs disturb them least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aiockpt.format.document import ALGORITHM, BLOCK_BYTES
from aiockpt.format.manifest import (
    FileEntry,
    Manifest,
    Receipt,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    encode_receipt,
)
from aiockpt.format.merge import merge_receipts
from aiockpt.format.names import data_path
from aiockpt.format.parts import MAX_TABLE_PIECES, attach, detach
from aiockpt.format.validate import check_manifest
from aiockpt.planning.read_plan import Wanted, plan_load
from aiockpt.planning.spread import LocalBoxes, Part, spread
from aiockpt.planning.write_plan import SavePlan, plan_save
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard, digest_structure
from benchmarks.visit import Outcome, Turn

COLUMNS = 1024
ROWS_A_RANK = 4
MOST_SHARDS = 100
SLAB_BYTES = 16 << 20
FILE_BYTES = 2 << 30
ATTEMPT = "0" * 12
STEP_ID = "step-00000001"

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of *work* and its least CPU seconds: of five runs if it is quick, else of one."""
    best = float("inf")
    for left in range(4, -1, -1):
        begun = time.process_time()
        result = work()
        best = min(best, time.process_time() - begun)
        if best > 0.5 or not left:
            return result, best
    raise AssertionError("the last run returns")


def planning(turn: Turn, outcome: Outcome) -> None:
    """Measure all worlds; with fewer tensors where one checkpoint could not hold the pieces."""
    tensors = turn.settings["tensors"]
    for ranks in turn.settings["ranks"]:
        for sharding in turn.contenders:
            some = min(tensors, MAX_TABLE_PIECES // ranks) if sharding == "FSDP" else tensors
            if some < tensors:
                outcome.note(
                    turn,
                    f"Left out: FSDP, {ranks:,} ranks × {tensors:,} tensors: {ranks * tensors:,} pieces are more than the "
                    f"{MAX_TABLE_PIECES:,} of a checkpoint; measured with {some:,} tensors.",
                )
            found = measure(sharding, ranks, some)
            row = f"{sharding}, {ranks:,} × {some:,}"
            outcome.add(turn, row, {name: [value] for name, value in found.items()})


def measure(sharding: str, ranks: int, tensors: int) -> dict[str, float]:
    """Measure one world; seconds, bytes, and the pieces of the manifest, replicas written once."""
    shards = ranks if sharding == "FSDP" else min(ranks, MOST_SHARDS)
    shape = (shards * ROWS_A_RANK, COLUMNS)
    lists = [[LocalBoxes(f"layers.{n}.weight", "F32", shape, (_rows(shards, place),)) for n in range(tensors)]
             for place in range(shards)]  # fmt: skip
    holdings = [lists[rank % shards] for rank in range(ranks)]
    parts, plan_s = timed(lambda: spread(holdings, block_bytes=BLOCK_BYTES))
    state = take_share(holdings[0], parts[0])
    whole = [
        TensorShard(name=one.name, dtype=one.dtype, shape=one.shape, boxes=one.boxes, data=None) for one in lists[0]
    ]
    _, rank_plan_s = timed(lambda: plan_state(state))
    _, warm_s = timed(lambda: digest_structure(whole, {}))
    receipts = []
    for rank in range(ranks):
        receipts.append(planned_receipt(plan_state(take_share(holdings[rank], parts[rank])), rank, ranks))
        parts[rank] = ()  # ten million of them: used ones are freed
    holdings.clear()
    lists.clear()
    manifest, merge_s = timed(lambda: merge_receipts(receipts, writer="benchmark", write_id="w", created_ns=0))
    receipt_bytes = len(encode_receipt(receipts[0]))
    receipts.clear()

    def encode() -> tuple[bytes, dict[str, bytes]]:
        written, blobs = detach(manifest)
        return encode_manifest(written), blobs

    (document, blobs), encode_s = timed(encode)
    pieces = sum(len(entry.pieces) for entry in manifest.tensors.values())

    def decode() -> Manifest:
        found = decode_manifest(document)
        found = attach(found, blobs) if found.parts else found
        check_manifest(found, STEP_ID, 1)
        return found

    found, decode_s = timed(decode)
    if list(found.tensors) != list(manifest.tensors):
        raise RuntimeError("the manifest that was decoded is not the one that was encoded")
    wanted = [Wanted(name, _rows(max(1, shards // 2), 0, of=shape[0])) for name in found.tensors]
    _, load_plan_s = timed(lambda: plan_load(found, wanted))
    return {
        "pieces_count": pieces,
        "plan_s": plan_s,
        "rank_plan_s": rank_plan_s,
        "known_plan_s": warm_s,
        "receipt_bytes": receipt_bytes,
        "merge_s": merge_s,
        "manifest_bytes": len(document) + sum(map(len, blobs.values())),
        "encode_s": encode_s,
        "decode_s": decode_s,
        "load_plan_s": load_plan_s,
    }


def _rows(shards: int, place: int, of: int | None = None) -> Box:
    size = ROWS_A_RANK if of is None else of // shards
    return Box((place * size, 0), (size, COLUMNS))


def take_share(holdings: Sequence[LocalBoxes], parts: Sequence[Part]) -> ShardedState:
    """Return the state of a rank, reduced to the parts that it writes."""
    shards = tuple(
        TensorShard(name=one.name, dtype=one.dtype, shape=one.shape, boxes=(part.box,), data=None)
        for part in parts
        for one in (holdings[part.holding],)
    )
    return ShardedState(tensors=shards, alias={}, values={}, per_rank=None, structure="")


def plan_state(state: ShardedState) -> SavePlan:
    return plan_save(state, slab_bytes=SLAB_BYTES, file_bytes=FILE_BYTES)


def planned_receipt(plan: SavePlan, rank: int, world_size: int, block_bytes: int = BLOCK_BYTES) -> Receipt:
    """Return the vote of a rank that carried out *plan*; the checksums are zeros."""
    sizes = [file.size for file in plan.files]
    return vote(rank, world_size, sizes, plan.tensors, {"step": 1}, plan.digest, block_bytes)


def vote(
    rank: int,
    world_size: int,
    sizes: Sequence[int],
    tensors: dict[str, TensorEntry],
    state: dict[str, Any],
    plan_digest: str = "",
    block_bytes: int = BLOCK_BYTES,
) -> Receipt:
    """Return the receipt of *rank* for data files of *sizes* bytes, of the first step of a run; the checksums are zeros."""
    files = tuple(
        FileEntry.of(
            data_path(ATTEMPT, rank, number),
            size=size,
            rank=rank,
            algo=ALGORITHM,
            block=block_bytes,
            sums=bytes(8 * -(-size // block_bytes)),
        )
        for number, size in enumerate(sizes)
    )
    return Receipt(
        id=STEP_ID,
        step=1,
        generation=1,
        sequence=1,
        run=ATTEMPT,
        parent=None,
        attempt=ATTEMPT,
        rank=rank,
        world_size=world_size,
        created_ns=0,
        plan_digest=plan_digest,
        scalars_digest="",
        files=files,
        tensors=tensors,
        state=state,
    )
