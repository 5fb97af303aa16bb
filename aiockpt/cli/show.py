"""How do results look? Tables and trees for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from aiockpt.cli.diff import Change
from aiockpt.cli.doctor import Diagnosis
from aiockpt.engine.keep import Description, Pruned, StepInfo, TensorInfo
from aiockpt.format.names import split_name

out = Console()
err = Console(stderr=True)


class Check(msgspec.Struct, frozen=True):
    """The outcome of verifying one step."""

    step: int
    valid: bool
    bytes: int
    seconds: float
    problem: str | None = None


def json_or(as_json: bool, value: object, people: Callable[[], None]) -> None:
    """Print *value* as JSON, or let *people* print it."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    else:
        people()


def problem(message: str) -> None:
    """Print what went wrong."""
    err.print(f"[bold red]error:[/] {escape(message)}")


def size(count: float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def steps(root: str, found: Sequence[StepInfo]) -> None:
    """Print the committed steps; what is indented descends from a step that was left."""
    if not found:
        out.print(f"{escape(root)} holds no checkpoint yet.")
        return
    table = Table(title=f"{escape(root)}", title_justify="left", title_style="bold")
    for name in ("step", "saved", "from", "tensors", "size", "metrics", "state"):
        table.add_column(name, justify="right" if name in ("step", "tensors", "size") else "left")
    for info in found:
        saved = datetime.fromtimestamp(info.created_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S") if info.created_ns else "–"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in info.metrics.items() if value is not None)
        again = f" (generation {info.generation})" if info.generation > 1 else ""
        state = "[red]damaged[/]" if info.problem else "[green]verified[/]" if info.verified else "committed"
        table.add_row(
            str(info.step), saved, info.parent or "–", str(info.tensor_count), size(info.bytes), metrics, state + again
        )
    out.print(table)
    for info in found:
        if info.problem:
            out.print(f"[red]step {info.step}:[/] {escape(info.problem)}")


def description(seen: Description, depth: int) -> None:
    """Print the tree of a step: tensors by name, then the files, then the values."""
    info = seen.info
    tree = Tree(
        f"[bold]{info.id}[/]  {size(info.bytes)}, {info.tensor_count} tensors, generation {info.generation}, "
        f"saved by {info.world_size} rank(s){', [green]verified[/]' if info.verified else ''}"
    )
    branches: dict[tuple[str | int, ...], Tree] = {(): tree}
    totals = _totals(seen.tensors)
    for tensor in seen.tensors:
        path = split_name(tensor.name)
        shown = path if not depth else path[:depth]
        for level in range(1, len(shown) + 1):
            prefix = shown[:level]
            if prefix in branches:
                continue
            leaf = level == len(path)
            label = _tensor_label(tensor, str(path[-1])) if leaf else f"[bold]{escape(str(prefix[-1]))}[/]"
            if not leaf:
                label += f"  [dim]{totals[prefix][0]} tensors, {size(totals[prefix][1])}[/]"
            branches[prefix] = branches[prefix[:-1]].add(label)
    for name, target in seen.alias.items():
        tree.add(f"{escape(name)} [dim]= {escape(target)} (same memory)[/]")
    out.print(tree)
    _values(seen)


def _totals(tensors: Sequence[TensorInfo]) -> dict[tuple[str | int, ...], tuple[int, int]]:
    totals: dict[tuple[str | int, ...], tuple[int, int]] = {}
    for tensor in tensors:
        path = split_name(tensor.name)
        for level in range(1, len(path)):
            count, held = totals.get(path[:level], (0, 0))
            totals[path[:level]] = (count + 1, held + tensor.bytes)
    return totals


def _tensor_label(tensor: TensorInfo, name: str) -> str:
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    files = ", ".join(path.rpartition("/")[2] for path in tensor.files)
    return f"{escape(name)}  [cyan]{tensor.dtype}[/] {shape}  {size(tensor.bytes)}  [dim]{files}[/]"


def _values(seen: Description) -> None:
    encoded = msgspec.json.encode({"values": seen.values, "per_rank": seen.per_rank, "user": seen.user})
    text = msgspec.json.format(encoded, indent=2).decode()
    lines = text.splitlines()
    out.print("[bold]values[/]")
    out.print("\n".join(lines[:40]), markup=False, highlight=True)
    if len(lines) > 40:
        out.print(f"[dim]… {len(lines) - 40} more lines: --json shows all[/]")


def checks(results: Sequence[Check]) -> None:
    """Print what a verification found."""
    for result in results:
        if result.valid:
            speed = f", {size(result.bytes / result.seconds)}/s" if result.seconds else ""
            out.print(f"[green]✓[/] step {result.step}: {size(result.bytes)} as saved ({result.seconds:.2f} s{speed})")
        else:
            name = f"step {result.step}" if result.step >= 0 else "the newest step"
            out.print(f"[red]✗[/] {name}: {escape(result.problem or '')}")


def changes(one: int, two: int, found: Sequence[Change]) -> None:
    """Print which leaves differ between two steps."""
    differing = [change for change in found if change.kind != "same"]
    if not differing:
        out.print(f"[green]steps {one} and {two} are equal[/]: {len(found)} leaves, bit for bit")
        return
    table = Table(title=f"step {one} → {two}", title_justify="left", title_style="bold")
    for name in ("leaf", "change", "largest difference", "mean difference"):
        table.add_column(name, overflow="fold")
    for change in differing:
        numbers = [f"{n:.4g}" if n is not None else "" for n in (change.max_difference, change.mean_difference)]
        table.add_row(escape(change.name), escape(change.detail or change.kind), *numbers)
    out.print(table)
    out.print(f"{len(differing)} of {len(found)} leaves differ")


def pruned(found: Pruned, deleted: bool) -> None:
    """Print what retention removed, or would remove."""
    verb = "deleted" if deleted else "would delete"
    for step in found.steps:
        out.print(f"{verb} [bold]{step.id}[/]: {step.reason}")
    for garbage in found.garbage:
        kind = f"generation {garbage.generation}" if garbage.generation is not None else "an uncommitted attempt"
        out.print(f"{verb} {kind} of {garbage.step_id} (a-{garbage.attempt})")
    for step_id, reason in found.left:
        out.print(f"[yellow]left {step_id}: {reason}[/]")
    if not (found.steps or found.garbage):
        out.print("nothing to delete")
    elif not deleted:
        out.print("[dim]this was a dry run: add --yes to delete[/]")


def finished(found: Sequence[StepInfo]) -> None:
    """Print which commits were finished."""
    for one in found:
        out.print(f"[green]committed[/] {one.id} (generation {one.generation}) from its {one.world_size} receipt(s)")
    if not found:
        out.print("nothing to finish: no attempt has all its receipts and no manifest")


def diagnosis(found: Diagnosis) -> None:
    """Print what a place can do."""
    table = Table(title=escape(found.root), title_justify="left", title_style="bold", show_header=False)
    table.add_column("what")
    table.add_column("found")
    for name, value in found.rows():
        table.add_row(name, value)
    out.print(table)
    for line in found.problems:
        out.print(f"[red]✗[/] {escape(line)}")
    if not found.problems:
        out.print("[green]✓[/] commits here are exclusive and durable")
