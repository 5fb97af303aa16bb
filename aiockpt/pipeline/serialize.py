"""What are the checksums of a window? Hashed from the very memory that is written, block by block (DECISIONS 16)."""

from __future__ import annotations

from aiockpt.format.checksum import hash_block


def hash_blocks(memory: memoryview, block_bytes: int) -> bytes:
    """Return the checksums of *memory*'s blocks, 8 bytes each, one after the other; the last block may be shorter.

    Runs on a worker thread; the hash releases the GIL.
    """
    return b"".join(hash_block(memory[start : start + block_bytes]) for start in range(0, len(memory), block_bytes))
