"""Rows in which every two values of any two options meet once, at least: few rows for many options.

Most faults of options come from two of them. A greedy draw makes about a fifth more rows than the best known tables need,
and always the same ones.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]
TRIES = 60
"""Rows that are drawn for each one that is taken."""


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    """Yield each two options of *row* with their values."""
    return map(frozenset, combinations(row.items(), 2))


def cover(options: Mapping[str, Sequence[str]], possible: Callable[[Row], bool], seed: int = 0) -> list[Row]:
    """Return rows that are *possible* and have all pairs between them that any such row has."""
    dice = random.Random(seed)
    all_rows = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    choices = [row for row in all_rows if possible(row)]
    left = {pair for row in choices for pair in pairs_of(row)}
    rows: list[Row] = []
    while left:
        wanted = dict(min(left, key=sorted)).items()
        fitting = [row for row in choices if wanted <= row.items()]
        drawn = dice.sample(fitting, min(TRIES, len(fitting)))
        row = max(drawn, key=lambda one: len(left.intersection(pairs_of(one))))
        left.difference_update(pairs_of(row))
        rows.append(row)
    return rows
