"""The tiling check, for many tensors at once: every element of a shape must be in exactly one of some boxes.

Guarantees:

- Linear in the number of boxes, whatever their form, except for a sort where a single axis is cut; never in pairs.
- A tiling is always accepted. Anything else is refused, except with probability below 2⁻⁷⁰. No arithmetic wraps.

The idea: assign a random number to each cut of each axis; the weight of a box is the product over the axes of (number at
its end − number at its start), modulo the prime 2³¹ − 1. Weight is additive, so boxes that tile have together the weight
of the whole. If some element is covered twice or never, the difference is a nonzero polynomial in the random numbers, of
a degree of at most 32 (the axes): it vanishes by chance only (Schwartz–Zippel; coverage counts stay below the prime), in
each of three rounds. The numbers are derived from a cryptographic digest of the boxes themselves, so they are the same
everywhere and boxes cannot be chosen to fit them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_PRIME = 2**31 - 1
_ROUNDS = 3


def are_tiled(shapes: Ints, counts: Ints, offsets: Ints, sizes: Ints) -> Flags:
    """Return which tensors are tiled by their boxes, each element exactly once; boxes must lie inside their tensor.

    Args:
        shapes: (tensors, dimensions); a tensor of fewer dimensions has 1 in the others, as its boxes have 0 and 1.
        counts: boxes of each tensor.
        offsets, sizes: (boxes, dimensions), those of the first tensor first; numbers below 2⁴⁸.
    """
    tiled: Flags = (shapes == 0).any(axis=1)
    chosen = ~tiled & (counts > 0)
    if not chosen.any():
        return tiled
    if not chosen.all():
        own = np.repeat(chosen, counts)
        shapes, offsets, sizes, counts = shapes[chosen], offsets[own], sizes[own], counts[chosen]
    starts = np.cumsum(counts) - counts
    # `reduceat` has no empty result, for no boxes it returns that of the next one: such tensors were left out above.
    cut = np.logical_or.reduceat(sizes != np.repeat(shapes, counts, axis=0), starts, axis=0)
    axes = cut.sum(axis=1)
    found = counts == 1
    if (one := axes == 1).any():
        own = np.repeat(one, counts)
        axis, places = cut[one].argmax(axis=1), np.arange(int(own.sum()))
        column = np.repeat(axis, counts[one])
        lines = offsets[own][places, column], sizes[own][places, column]
        found[one] = _follow_one_another(shapes[one][np.arange(len(axis)), axis], counts[one], *lines)
    if (several := axes > 1).any():
        own = np.repeat(several, counts)
        found[several] = _weigh_as_much(shapes[several], counts[several], offsets[own], sizes[own])
    tiled[chosen] = found
    return tiled


def _follow_one_another(whole: Ints, counts: Ints, starts: Ints, lengths: Ints) -> Flags:
    """Return which tensors are tiled by boxes cut on one axis: each begins where another ended. Exact, and quicker."""
    filled = lengths > 0
    owner = np.repeat(np.arange(len(counts)), counts)[filled]
    starts, stops = starts[filled], (starts + lengths)[filled]
    first = np.ones(len(owner), bool)
    first[1:] = owner[1:] != owner[:-1]
    if ((starts[1:] < starts[:-1]) & ~first[1:]).any():
        order = np.lexsort((starts, owner))
        starts, stops = starts[order], stops[order]
    wrong = starts != np.where(first, 0, np.roll(stops, 1))
    wrong |= np.roll(first, -1) & (stops != whole[owner])
    found: Flags = np.bincount(owner, minlength=len(counts)) > 0
    found &= np.bincount(owner[wrong], minlength=len(counts)) == 0
    return found


def _weigh_as_much(shapes: Ints, counts: Ints, offsets: Ints, sizes: Ints) -> Flags:
    """Return for which tensors the boxes have the weight of the whole, in several rounds."""
    seed = hashlib.blake2b(np.ascontiguousarray(offsets).tobytes())
    seed.update(np.concatenate([np.ravel(sizes), np.ravel(shapes), counts]).tobytes())
    keys = np.random.default_rng(int.from_bytes(seed.digest(), "little")).integers(
        2**64, size=(_ROUNDS, shapes.shape[1]), dtype=np.uint64
    )
    starts = np.cumsum(counts) - counts
    tiled: Flags = np.ones(len(counts), bool)
    for key in keys:
        # Each weight is below 2³¹, so the sum of up to 2³² of them does not wrap.
        found = np.add.reduceat(_weigh(offsets, offsets + sizes, key), starts) % _PRIME
        tiled &= found == _weigh(np.zeros_like(shapes), shapes, key)
    return tiled


def _weigh(starts: Ints, stops: Ints, keys: NDArray[np.uint64]) -> Ints:
    weights = np.ones(len(starts), np.int64)
    for axis, key in enumerate(keys):
        weights *= (_number(stops[:, axis], key) - _number(starts[:, axis], key)) % _PRIME
        weights %= _PRIME
    return weights


def _number(places: Ints, key: Any) -> Ints:
    """Return the random number at each of *places* on one axis (the mixing of splitmix64)."""
    mixed = places.astype(np.uint64) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: Ints = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
    return numbers % _PRIME


def add_up(volumes: Ints, counts: Ints) -> list[int]:
    """Return the sums of consecutive *volumes*, *counts* in each; a sum may not fit into 8 bytes."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    halves = (np.concatenate([[0], np.cumsum(half)])[ends] for half in (volumes >> 32, volumes & 0xFFFFFFFF))
    high, low = (np.diff(sums).tolist() for sums in halves)
    return [(some << 32) + rest for some, rest in zip(high, low, strict=True)]
