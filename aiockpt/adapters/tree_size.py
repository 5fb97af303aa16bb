"""Is the tree of plain values small enough for every reader (docs/format.md#limits), and which leaves make it large?

A tree that grows while the program trains (a log, a history) is warned of at a half, three quarters and seven eighths of
the limits, so that no run begins to fail without having said so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from aiockpt.adapters.stored import members_of
from aiockpt.errors import ManifestError, UnsupportedStateError
from aiockpt.format.document import MAX_TREE_BYTES, MAX_TREE_NODES, check_tree
from aiockpt.format.names import join_name
from aiockpt.state.tree import TAG, Node, Path

MIB = 1 << 20
WARN_AT = (0.5, 0.75, 0.875)
SHOWN = 3
_ADVICE = "Keep large ones as tensors or arrays (a long list of numbers is stored as one), or write logs to a file."
logger = logging.getLogger("aiockpt")


class TreeSize:
    """Measures the trees of the walks of one program."""

    def __init__(self) -> None:
        self._warned = 0

    def check(self, values: Node) -> None:
        """Refuse a tree that no reader would accept, and warn of one that grows towards it.

        Raises:
            UnsupportedStateError: names the leaves that make it large.
        """
        raw = msgspec.json.encode(values)
        try:
            count = check_tree(raw, "the state")
        except ManifestError as error:
            raise UnsupportedStateError("the state", f"{error}. {_biggest(values)}. {_ADVICE}") from error
        filled = max(count / MAX_TREE_NODES, len(raw) / MAX_TREE_BYTES)
        due = sum(filled >= mark for mark in WARN_AT)
        if due > self._warned:
            self._warned = due
            logger.warning(
                "the plain values of the state are %d values, %.1f MiB, and at most %d and %d MiB can be saved. %s. %s",
                count,
                len(raw) / MIB,
                MAX_TREE_NODES,
                MAX_TREE_BYTES // MIB,
                _biggest(values),
                _ADVICE,
            )


def _biggest(values: Node) -> str:
    """Return in words which leaves have the most text."""
    found = sorted(_leaves(values, (), _size(values) // (4 * SHOWN)), key=lambda leaf: -leaf[1])[:SHOWN]
    return "The biggest: " + ", ".join(f"{join_name(path) or 'all'} ({size / MIB:.1f} MiB)" for path, size in found)


def _leaves(node: Node, path: Path, least: int) -> Iterator[tuple[Path, int]]:
    """Yield the parts of at least *least* bytes that have no such parts themselves, with their sizes."""
    inside = node["value"] if type(node) is dict and node.get(TAG) in ("stateful", "codec") else node
    parts = [(key, part, _size(part)) for key, part in members_of(inside).items() if type(part) in (dict, list, str)]
    large = [(key, part) for key, part, size in parts if size >= least]
    if not large:
        yield path, _size(node)
    for key, part in large:
        yield from _leaves(part, (*path, key), least)


def _size(node: Node) -> int:
    return len(msgspec.json.encode(node))
