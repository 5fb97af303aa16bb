"""The tiling check: whether every element of a shape is in exactly one of some boxes.

Guarantees:

- Linear in the number of boxes, whatever their form, but for one sort where a single axis is cut: no pair is ever
  compared.
- A tiling is always accepted. Anything else is refused, except with probability below 2⁻⁵⁵.

The idea: give each cut of each axis a random number; a box weighs the product over the axes of (number at its end −
number at its start), modulo the prime 2⁶¹ − 1. Weight is additive, so boxes that tile weigh together what the whole
weighs. If some element is covered twice or never, the difference is a polynomial in the random numbers that is not zero
and has at most 32 axes as degree: it vanishes by chance only (Schwartz–Zippel; coverage counts stay below the prime).
The numbers come from a cryptographic digest of the boxes themselves, so they are the same everywhere and boxes
cannot be chosen to fit them.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence

import msgspec

_PRIME = 2**61 - 1

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""A box as (offsets, sizes)."""


def tiles(shape: tuple[int, ...], boxes: Sequence[Extent]) -> bool:
    """Return whether *boxes*, which lie inside *shape*, cover each of its elements exactly once."""
    if 0 in shape:
        return True
    cut = [axis for axis, size in enumerate(shape) if any(sizes[axis] != size for _, sizes in boxes) or not boxes]
    if len(cut) == 1:
        return _follow_one_another(cut[0], shape, boxes)
    seed = hashlib.blake2b(msgspec.json.encode((shape, boxes))).digest()
    source = random.Random(int.from_bytes(seed, "little"))
    cut_axes: list[tuple[int, defaultdict[int, int]]] = [
        (axis, defaultdict(lambda: source.randrange(_PRIME))) for axis in cut
    ]
    covered = 0
    for offsets, sizes in boxes:
        weight = 1
        for axis, numbers in cut_axes:
            start = offsets[axis]
            weight = weight * (numbers[start + sizes[axis]] - numbers[start]) % _PRIME
        covered += weight
    whole = 1
    for axis, numbers in cut_axes:
        whole = whole * (numbers[shape[axis]] - numbers[0]) % _PRIME
    return covered % _PRIME == whole


def _follow_one_another(axis: int, shape: tuple[int, ...], boxes: Sequence[Extent]) -> bool:
    """Say whether boxes that are cut on one axis only tile: each begins where another ended. Exact, and quicker."""
    cursor = 0
    for offset, size in sorted((offsets[axis], sizes[axis]) for offsets, sizes in boxes if 0 not in sizes):
        if offset != cursor:
            return False
        cursor += size
    return cursor == shape[axis]
