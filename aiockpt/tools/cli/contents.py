"""Output of `aiockpt inspect`: the tree of tensors, the files that hold them, and the values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

from rich.markup import escape
from rich.text import Text

from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import TensorRef, read_tree
from aiockpt.engine.maintenance import Description, TensorInfo
from aiockpt.format.names import join_name, list_names, split_name
from aiockpt.state.tree import Opaque, Path, key_parts
from aiockpt.tools.cli.show import (
    Row,
    ago,
    count,
    moment,
    natural_order,
    out,
    print_table,
    say,
    shape_text,
    size,
    title,
)

ROWS = 60
"""Limits without --all: deeper levels are folded, and longer lists of values cut, to a screen or two."""
SHORT_ITEMS = 8


class _Node:
    """A level of the tree of names: its tensor, or the tensor that it is another name of, and the levels below."""

    def __init__(self) -> None:
        self.tensor: TensorInfo | None = None
        self.alias_of: str | None = None
        self.below: dict[str, _Node] = {}

    def enter(self, name: str) -> _Node:
        node = self
        for part in split_name(name):
            node = node.below.setdefault(str(part), _Node())
        return node

    def tidy(self) -> None:
        """Sort the levels below in natural order; join levels with a single child."""
        below: dict[str, _Node] = {}
        for part, node in sorted(self.below.items(), key=lambda item: natural_order(item[0])):
            while len(node.below) == 1 and node.tensor is None and node.alias_of is None:
                ((inner, node),) = node.below.items()
                part = f"{part}.{inner}"
            node.tidy()
            below[part] = node
        self.below = below

    def tensors(self) -> Iterator[TensorInfo]:
        if self.tensor is not None:
            yield self.tensor
        for node in self.below.values():
            yield from node.tensors()

    def count_rows(self, depth: int) -> int:
        return sum(1 + node.count_rows(depth - 1) for node in self.below.values()) if depth else 0

    def height(self) -> int:
        return 1 + max((node.height() for node in self.below.values()), default=-1)


def show_description(root: str, seen: Description, rank: str, depth: int | None, everything: bool) -> None:
    """Print the contents of a step.

    Args:
        rank: the rank whose values are shown, where each rank has its own.
        depth: levels of the tree to show; None chooses.
        everything: fold and cut nothing.
    """
    _show_head(root, seen)
    tree = _Node()
    for tensor in seen.tensors:
        tree.enter(tensor.name).tensor = tensor
    for name, target in seen.alias.items():
        tree.enter(name).alias_of = target
    tree.tidy()
    _show_tensors(seen, tree, tree.height() if everything else depth or _fitting_depth(tree))
    _show_files(seen)
    _show_left_out(seen, everything)
    _show_values(seen, rank, everything)


def _show_head(root: str, seen: Description) -> None:
    info = seen.info
    facts = [size(info.bytes), count(info.tensor_count, "tensor")]
    if info.world_size > 1:
        facts.append(f"saved by {info.world_size} ranks")
    if info.generation > 1:
        facts.append(f"generation {info.generation}")
    if seen.left_out:
        facts.append(f"{count(len(seen.left_out), 'name')} left out")
    facts.append("verified" if info.verified else "not verified yet")
    title(f"{root} {info.id}", " · ".join(facts))
    say(f"[dim]{moment(info.created_ns)}, {ago(info.created_ns)}{f', from {info.parent}' if info.parent else ''}[/]")
    if info.forked_from:
        say(f"[dim]{escape(info.describe_origin())}[/]")
    if seen.not_finite:
        names = list_names([f"{name} ({many:,})" for name, many in seen.not_finite.items()])
        say(f"[bold red]NaN or infinite[/]  numbers in {escape(names)}")
    if info.metrics:
        say("   ".join(f"{escape(name)} [bold]{value}[/]" for name, value in info.metrics.items()))
    if seen.user is not None:
        say(f"user  {escape(shorten(seen.user, 200))}")


def _fitting_depth(tree: _Node) -> int:
    """Return the most levels that fit; all of them where that is not twice as much."""
    height = tree.height()
    if tree.count_rows(height) <= 2 * ROWS:
        return height
    return max((depth for depth in range(1, height) if tree.count_rows(depth) <= ROWS), default=1)


def _show_tensors(seen: Description, tree: _Node, depth: int) -> None:
    files = _files(seen)
    headings = ["tensors", "dtype", "shape", "size", *(["file"] if len(files) > 1 else [])]
    rows = [(line, *_tensor_cells(node, folded, files)) for line, node, folded in _rows(tree, depth)]
    print_table(headings, rows, right=("size",), folds="tensors")
    if depth < tree.height():
        say("[dim]deeper levels are folded: --depth N shows N levels, --all shows everything[/]")


def _rows(tree: _Node, depth: int, indent: str = "") -> Iterator[tuple[Text, _Node, bool]]:
    """Yield each level with its place in the drawing, and whether the levels below are folded."""
    last = len(tree.below) - 1
    for place, (part, node) in enumerate(tree.below.items()):
        branch, under = ("└─ ", "   ") if place == last else ("├─ ", "│  ")
        line = Text(indent + branch, "dim").append(Text(str(part), "bold" if node.below else "not dim"))
        folded = depth <= 1 and bool(node.below)
        yield line, node, folded
        if depth > 1:
            yield from _rows(node, depth - 1, indent + under)


def _tensor_cells(node: _Node, folded: bool, files: Mapping[str, int]) -> list[str | Text]:
    if node.alias_of is not None:
        return [Text(f"= {node.alias_of}", "dim")]
    tensor = node.tensor
    if tensor is not None:
        where = ", ".join(str(files[path]) for path in tensor.files)
        return [
            Text(tensor.dtype, "cyan"),
            shape_text(tensor.shape),
            size(tensor.bytes),
            *([where] if len(files) > 1 else []),
        ]
    held = list(node.tensors())
    total = Text(size(sum(tensor_info.bytes for tensor_info in held)), "" if folded else "dim")
    return ["", Text(count(len(held), "tensor"), "" if folded else "dim"), total]


def _files(seen: Description) -> dict[str, int]:
    """Return the files that hold tensors, numbered as they are shown."""
    return {
        path: number for number, path in enumerate(sorted({path for tensor in seen.tensors for path in tensor.files}))
    }


def _show_files(seen: Description) -> None:
    rows = [
        (str(number), path, str(sum(path in tensor.files for tensor in seen.tensors)))
        for path, number in _files(seen).items()
    ]
    print_table(("", "files", "tensors"), rows, right=("", "tensors"), folds="files")


def _show_left_out(seen: Description, everything: bool) -> None:
    """Print the names that were excluded from the save."""
    if not seen.left_out:
        return
    names = sorted(seen.left_out.items(), key=lambda item: natural_order(item[0]))
    rows = [
        (escape(name), *(("", "") if facts is None else (Text(facts[0], "cyan"), shape_text(facts[1]))))
        for name, facts in names
    ]
    _print_cut(("left out when saved", "dtype", "shape"), rows, everything)


def _print_cut(headings: Sequence[str], rows: Sequence[Row], everything: bool) -> None:
    """Print a table whose first, or last, heading folds; cut it where it is longer than two screens."""
    shown = rows if everything or len(rows) <= 2 * ROWS else rows[:ROWS]
    print_table(headings, shown, folds=headings[0] if len(headings) > 2 else headings[-1])
    if len(shown) < len(rows):
        say(f"[dim]and {len(rows) - len(shown)} more: --all shows everything[/]")


def _show_values(seen: Description, rank: str, everything: bool) -> None:
    stored = Stored(
        tensors={tensor.name: (tensor.dtype, tensor.shape) for tensor in seen.tensors},
        alias=seen.alias,
        values=seen.values,
        per_rank=seen.per_rank.get(rank),
        where=seen.info.id,
    )
    values = read_values(stored)
    ranks = f" of rank {rank}" if seen.per_rank and seen.info.world_size > 1 else ""
    if not values:
        out.print()
        say("[dim]no values beside the tensors[/]")
        return
    width = 10_000 if everything else 48
    rows = [(escape(name), Text(shorten(value, width))) for name, value in values.items()]
    _print_cut((f"values{ranks}", ""), rows, everything)


def read_values(stored: Stored) -> dict[str, Any]:
    """Return the leaves of the values of a step by name, as one rank had them; tensors are left out.

    Lists and tuples of plain values are leaves.
    """
    leaves = _leaves((), read_tree(stored))
    return {join_name(path): value for path, value in leaves if not isinstance(value, TensorRef)}


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    parts: list[tuple[str | int, Any]]
    if isinstance(value, Opaque):
        parts = [(value.codec, value.value)]
    elif isinstance(value, Mapping):
        parts = list(zip(_parts_of(value), value.values(), strict=True))
    elif isinstance(value, list | tuple | deque) and not _is_plain(value):
        parts = list(enumerate(value))
    else:
        yield path, value
        return
    for part, inner in parts:
        yield from _leaves((*path, part), inner)


def _parts_of(keys: Mapping[Any, Any]) -> list[str | int]:
    """Return distinct parts of names for the keys of a dict; keys that are neither text nor small integers as they print."""
    parts = key_parts(keys)
    for place, key in enumerate(keys):
        if parts[place] is not key and (shown := repr(key)) not in parts:
            parts[place] = shown
    return parts


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | deque):
        return all(_is_plain(item) for item in value)
    return not isinstance(value, Mapping | Opaque | TensorRef)


def shorten(value: Any, width: int = 60) -> str:
    """Return *value* in at most *width* characters."""
    if isinstance(value, bytes | bytearray):
        text = repr(value) if len(value) <= SHORT_ITEMS else f"{len(value)} bytes, crc32 {crc32(value):08x}"
    elif isinstance(value, list | tuple) and len(value) > SHORT_ITEMS:
        first = ", ".join(shorten(item, width) for item in value[:3])
        text = f"{len(value)} items: {first}, …"
    else:
        text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
