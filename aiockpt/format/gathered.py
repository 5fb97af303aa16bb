r"""Receipts of many ranks in one object: line by line, each still its own proof.

At 10,000 ranks rank 0 cannot read 10,000 receipts one by one in good time. So each group of ranks also writes its
receipts into one object, ``g/r00064-r00127.jsonl`` in the attempt's folder: one sealed receipt a line, by rank
(docs/format.md#receipts). Of receipts with equal plain values only the first has them; the others' ``state`` is null.

Guarantees:

- A gathered object is a copy and never a vote of its own: what is decoded is equal to the receipts themselves.
- All or nothing. Each line has its own digest and passes every check of a receipt, and the lines are exactly the ranks
  in the name; a line that is damaged, missing, repeated or of another attempt invalidates the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aiockpt.errors import ManifestError
from aiockpt.format.document import MAX_DOCUMENT_BYTES
from aiockpt.format.manifest import Receipt, decode_receipt, encode_receipt
from aiockpt.format.names import gathered_key
from aiockpt.format.validate import check_receipt


def encode_gathered(receipts: Sequence[Receipt]) -> bytes:
    """Return the gathered object of the receipts of consecutive ranks, in the order of the ranks.

    Raises:
        ManifestError: it would be larger than a reader accepts.
    """
    said: dict[str, object] = {}
    lines = []
    for receipt in receipts:
        # The states are compared, too: the digest is only what the receipt says, and decoding must give it back.
        if receipt.scalars_digest in said and said[receipt.scalars_digest] == receipt.state:
            receipt = msgspec.structs.replace(receipt, state=None)
        else:
            said.setdefault(receipt.scalars_digest, receipt.state)
        lines.append(encode_receipt(receipt))
    size = sum(map(len, lines))
    if size > MAX_DOCUMENT_BYTES:
        raise ManifestError(f"the receipts of {len(lines)} ranks have {size} bytes, more than {MAX_DOCUMENT_BYTES}")
    return b"".join(lines)


def decode_gathered(data: bytes, step_id: str, attempt: str, ranks: range) -> dict[int, Receipt]:
    """Return the receipts in *data*, found as those of *ranks* in *attempt* at *step_id*, by rank.

    Raises:
        ManifestError: they are not the votes of exactly these ranks.
    """
    what = gathered_key(step_id, attempt, ranks)
    *lines, rest = data.split(b"\n", len(ranks))
    if len(lines) != len(ranks) or rest:
        raise ManifestError(f"{what} does not hold {len(ranks)} lines: it is torn or was not written by us", key=what)
    said: dict[str, object] = {}
    receipts = {}
    for rank, line in zip(ranks, lines, strict=True):
        receipt = decode_receipt(line + b"\n", f"{what}, rank {rank}")
        check_receipt(receipt, step_id, attempt, rank)
        if receipt.state is None:
            receipt = msgspec.structs.replace(receipt, state=said.get(receipt.scalars_digest))
        else:
            said.setdefault(receipt.scalars_digest, receipt.state)
        receipts[rank] = receipt
    return receipts
