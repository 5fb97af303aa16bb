"""The inodes of the simulated file system, as far as a power cut is concerned.

A node has a durable part, the part that processes see, and the unflushed changes that lead from one to the other.
Each change lists what a power cut may leave of it; `simulation.crash_states` chooses among these.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["file", "link", "fifo"]
SECTOR_BYTES = 512
"""Bytes that a disk writes whole or not at all."""


@dataclass(frozen=True, eq=False)
class Write:
    """Bytes that were written to a file and not flushed; without data, an extension of it."""

    offset: int
    data: bytes
    size: int

    def apply(self, content: bytearray) -> None:
        end = self.offset + self.size
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data

    def _sectors(self) -> list[Write]:
        ends = range((self.offset // SECTOR_BYTES + 1) * SECTOR_BYTES, self.offset + len(self.data), SECTOR_BYTES)
        edges = [self.offset, *ends, self.offset + len(self.data)]
        return [
            Write(start, self.data[start - self.offset : end - self.offset], end - start)
            for start, end in itertools.pairwise(edges)
        ]

    def outcomes(self) -> list[tuple[Write, ...]]:
        """Return the plain outcomes of a power cut: nothing, all, the first or the second half."""
        whole: list[tuple[Write, ...]] = [(), (self,)]
        if len(sectors := self._sectors() if self.data else []) > 1:
            half = len(sectors) // 2
            whole += [tuple(sectors[:half]), tuple(sectors[half:])]
        return whole

    def torn(self, dice: random.Random) -> tuple[Write, ...]:
        """Return a random subset of the sectors."""
        return tuple(sector for sector in self._sectors() if dice.random() < 0.5)


@dataclass(frozen=True, eq=False)
class NameChange:
    """A name that was set (*node*), removed (no *node*), or moved in its directory (*node* and *old*)."""

    name: str
    node: Node | None
    old: str | None = None

    def apply(self, names: dict[str, Node]) -> None:
        if self.old is not None:
            names.pop(self.old, None)
        if self.node is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.node

    def outcomes(self) -> list[tuple[NameChange, ...]]:
        """Return the outcomes of a power cut: nothing, or all."""
        return [(), (self,)]

    def torn(self, dice: random.Random) -> tuple[NameChange, ...]:
        """Return one of the outcomes; a name does not tear."""
        return dice.choice(self.outcomes())


@dataclass(eq=False)
class SimulatedFile:
    """A regular file: its durable bytes, what processes see, and the unflushed changes between the two.

    Attributes:
        kind: "link" and "fifo" are no regular files and have no bytes; a link is dangling.
    """

    number: int
    modified_ns: int = 0
    links: int = 0
    durable: bytearray = field(default_factory=bytearray)
    content: bytearray = field(default_factory=bytearray)
    unflushed: list[Write] = field(default_factory=list)
    kind: Kind = "file"

    def change(self, change: Write) -> None:
        change.apply(self.content)
        self.unflushed.append(change)

    def flush(self) -> None:
        for change in self.unflushed:
            change.apply(self.durable)
        self.unflushed.clear()


@dataclass(eq=False)
class Folder:
    """A directory: its durable names, what processes see, and the unflushed changes between the two."""

    number: int
    modified_ns: int = 0
    links: int = 1
    durable: dict[str, Node] = field(default_factory=dict)
    names: dict[str, Node] = field(default_factory=dict)
    unflushed: list[NameChange] = field(default_factory=list)

    def change(self, change: NameChange) -> None:
        change.apply(self.names)
        self.unflushed.append(change)

    def flush(self) -> None:
        for change in self.unflushed:
            change.apply(self.durable)
        self.unflushed.clear()


Node = SimulatedFile | Folder


def walk(root: Folder, *, every_future: bool = False) -> Iterator[Node]:
    """Yield *root* and each node below it once; with *every_future*, also those that a power cut may restore."""
    seen: set[int] = set()
    todo: list[Node] = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Folder):
            todo.extend(node.names.values())
            if every_future:
                todo.extend(node.durable.values())
                todo.extend(change.node for change in node.unflushed if change.node is not None)
