"""Output of ``aiockpt top`` and ``aiockpt prune`` for a place of versions: the newest one, and where each receiver is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape

from aiockpt.publish.published_place import PlaceNow, ReceiverNow
from aiockpt.tools.cli import show


def view_place(root: str, place: PlaceNow | None, height: int, trouble: str = "") -> RenderableType:
    """Return *place* as lines and a table that fit into *height* lines, the receivers furthest behind first.

    Args:
        trouble: why the current state is unknown.
    """
    lines = [f"[bold red]{escape(trouble)}[/]"] if trouble else []
    if place is None:
        return Group(*map(show.line, [f"[bold]{escape(root)}[/]   no version is published yet", *lines]))
    lines += _header(root, place)
    parts: list[RenderableType] = [*map(show.line, lines)]
    if place.receivers:
        shown = show.fitting(place.receivers, height - len(parts))
        parts.append(_table(shown))
        if hidden := len(place.receivers) - len(shown):
            parts.append(show.line(f"[dim]{show.count(hidden, 'receiver')} more, no further behind[/]"))
    return Group(*parts)


def _header(root: str, place: PlaceNow) -> list[str]:
    share = f"{100 * place.bytes / max(place.weight_bytes, 1):.1f} % of {show.size(place.weight_bytes)}"
    what = "in full" if place.kind == "full" else f"a delta, {share}"
    silent = sum(one.is_silent for one in place.receivers)
    return [
        f"[bold]version {place.version}[/], of step {place.step}   {escape(root)}",
        f"published {show.span(place.published_s)} ago: {what}   "
        f"{show.count(place.count, 'version')} from {place.oldest} on",
        show.count(len(place.receivers), "receiver") + (f", [bold red]{silent} silent[/]" if silent else ""),
    ]


def _table(receivers: Sequence[ReceiverNow]) -> RenderableType:
    table = show.columns(
        "receiver", "host", "version", "step", "behind", "keeps from", "note",
        right=("version", "step", "behind", "keeps from", "note"), folds="host",
    )  # fmt: skip
    for column, heading in zip(table.columns, ("receiver", "host"), strict=False):
        # Names are cut before a number is, and each receiver has one line.
        column.no_wrap, column.header = False, show.line(heading)
    for one in receivers:
        noted, begun = f"{show.span(one.noted_s)} ago", one.version >= 0
        table.add_row(
            show.line(escape(one.name)),
            show.line(escape(one.host)),
            str(one.version) if begun else "",
            str(one.step) if begun else "",
            "" if not begun else f"[yellow]{one.behind}[/]" if one.behind else "0",
            "[dim]nothing[/]" if one.keeps is None else str(one.keeps),
            f"[bold red]{noted}[/]" if one.is_silent else noted,
        )
    return table
