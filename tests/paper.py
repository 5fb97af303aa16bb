"""A checkpoint on paper: votes and files as a save would leave them, without a storage that holds them."""

from collections.abc import Iterable
from typing import Any

import msgspec

from aiockpt.format.document import ALGORITHM, hash_block
from aiockpt.format.manifest import FileEntry, Manifest, Receipt
from aiockpt.format.merge import merge_receipts
from aiockpt.format.names import data_path

ATTEMPT = "3f9c21d07b44"


def paper_receipt(rank: int, **changes: Any) -> Receipt:
    """Return the vote of one of two ranks with every kind of fact in it, and no files or tensors unless *changes* say."""
    receipt = Receipt(
        id="step-00001000",
        step=1000,
        generation=1,
        sequence=7,
        run="c0ffee00c0de",
        parent="step-00000500",
        attempt=ATTEMPT,
        rank=rank,
        world_size=2,
        created_ns=5,
        plan_digest="xxh3_128:plan",
        scalars_digest="xxh3_128:scalars",
        files=(),
        tensors={},
        alias={},
        state={"step": 1000},
        per_rank={"seed": rank},
        metrics={"loss": 1.5},
        user={"note": "ünï"},
    )
    return msgspec.structs.replace(receipt, **changes)


def written_files(images: Iterable[bytes], block_bytes: int, rank: int = 0) -> tuple[FileEntry, ...]:
    """Return the entries of the files of attempt 000000000000 whose bytes are *images*."""
    entries = []
    for number, image in enumerate(images):
        sums = b"".join(hash_block(image[at : at + block_bytes]) for at in range(0, len(image), block_bytes))
        path = data_path("0" * 12, rank, number)
        entries.append(FileEntry.of(path, size=len(image), rank=rank, algo=ALGORITHM, block=block_bytes, sums=sums))
    return tuple(entries)


def paper_manifest(votes: Iterable[Receipt]) -> Manifest:
    """Return what *votes* become when they are merged."""
    return merge_receipts(list(votes), writer="aiockpt test", write_id="w-1", created_ns=9)
