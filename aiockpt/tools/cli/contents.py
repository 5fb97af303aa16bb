"""Output of `aiockpt inspect`: the tree of tensors, the files that hold them, and the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.markup import escape
from rich.text import Text

from aiockpt.adapters.stored import Stored
from aiockpt.engine.maintenance import Description, TensorInfo
from aiockpt.format.names import list_names, split_name
from aiockpt.tools.cli.leaf_values import read_values, shorten
from aiockpt.tools.cli.show import ago, columns, count, moment, natural_order, out, say, size, title

ROWS = 60
"""Without --all deeper levels are folded, and longer lists of values cut, to about a screen or two."""


class _Node:
    """A level of the tree of names: the tensor of that name, or what it is another name of, and what is below."""

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
        """Sort what is below in natural order; join levels that hold one thing only."""
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
    """Print what a step holds.

    Args:
        rank: whose values are shown where each rank has its own.
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
        say(f"[dim]{escape(info.tell_origin())}[/]")
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
    table = columns(*headings, right=("size",), folds="tensors")
    for line, node, folded in _rows(tree, depth):
        table.add_row(line, *_tensor_cells(node, folded, files))
    out.print()
    out.print(table)
    if depth < tree.height():
        say("[dim]deeper levels are folded: --depth N shows N levels, --all shows everything[/]")


def _rows(tree: _Node, depth: int, indent: str = "") -> Iterator[tuple[Text, _Node, bool]]:
    """Yield each level with its place in the drawing, and whether what is below is left out."""
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
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        return [Text(tensor.dtype, "cyan"), shape, size(tensor.bytes), *([where] if len(files) > 1 else [])]
    held = list(node.tensors())
    total = Text(size(sum(one.bytes for one in held)), "" if folded else "dim")
    return ["", Text(count(len(held), "tensor"), "" if folded else "dim"), total]


def _files(seen: Description) -> dict[str, int]:
    """Return the files that hold tensors, numbered as they are shown."""
    return {path: number for number, path in enumerate(sorted({path for one in seen.tensors for path in one.files}))}


def _show_files(seen: Description) -> None:
    table = columns("", "files", "tensors", right=("", "tensors"), folds="files")
    for path, number in _files(seen).items():
        table.add_row(str(number), path, str(sum(path in tensor.files for tensor in seen.tensors)))
    out.print()
    out.print(table)


def _show_left_out(seen: Description, everything: bool) -> None:
    """Print what was left out of the save by choice."""
    if not seen.left_out:
        return
    names = sorted(seen.left_out.items(), key=lambda item: natural_order(item[0]))
    shown = names if everything or len(names) <= 2 * ROWS else names[:ROWS]
    table = columns("left out when saved", "dtype", "shape", folds="left out when saved")
    for name, facts in shown:
        dtype, shape = ("", "") if facts is None else (facts[0], "×".join(map(str, facts[1])) or "scalar")
        table.add_row(escape(name), Text(dtype, "cyan"), shape)
    out.print()
    out.print(table)
    if len(shown) < len(names):
        say(f"[dim]and {len(names) - len(shown)} more: --all shows everything[/]")


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
    out.print()
    if not values:
        say("[dim]no values beside the tensors[/]")
        return
    shown = list(values.items())[: len(values) if everything or len(values) <= 2 * ROWS else ROWS]
    table = columns(f"values{ranks}", "", folds="")
    for name, value in shown:
        table.add_row(escape(name), Text(shorten(value, 10_000 if everything else 48)))
    out.print(table)
    if len(shown) < len(values):
        say(f"[dim]and {len(values) - len(shown)} more: --all shows everything[/]")
