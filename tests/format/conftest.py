"""A small, valid checkpoint on paper: what the tests of the format start from and then break."""

import pytest

from aiockpt.format.document import ALGORITHM
from aiockpt.format.manifest import FileEntry, Manifest, Piece, Receipt, TensorEntry
from aiockpt.format.names import data_path
from tests.paper import ATTEMPT, paper_manifest, paper_receipt

BLOCK_BYTES = 8 << 20


def _receipt(rank: int) -> Receipt:
    """Return the vote of one of two ranks: half of a matrix each; rank 0 has the small tensors too."""
    tensors = {"w": TensorEntry("F32", (4, 8), (Piece(0, 4096, 4160, (2 * rank, 0), (2, 8)),))}
    if rank == 0:
        tensors["embed"] = TensorEntry("BF16", (3,), (Piece(0, 4160, 4166, (0,), (3,)),))
        tensors["scale"] = TensorEntry("F64", (), (Piece(0, 4166, 4174, (), ()),))
        tensors["empty"] = TensorEntry("U8", (0, 5), ())
    size = 4174 if rank == 0 else 4160
    path = data_path(ATTEMPT, rank, 0)
    file = FileEntry.of(path, size=size, rank=rank, algo=ALGORITHM, block=BLOCK_BYTES, sums=bytes(range(8)))
    return paper_receipt(rank, generation=2, files=(file,), tensors=tensors, alias={"head": "embed"})


@pytest.fixture
def receipts() -> list[Receipt]:
    return [_receipt(0), _receipt(1)]


@pytest.fixture
def manifest(receipts: list[Receipt]) -> Manifest:
    return paper_manifest(receipts)
