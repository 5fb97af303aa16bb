"""How ``aiockpt top`` looks: three lines of the job, and its ranks, who waits the longest first."""

from __future__ import annotations

import anyio
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aiockpt.cli import show
from aiockpt.monitor.live_job import JobNow, JobWatch, RankNow
from aiockpt.monitor.peer_times import explain
from aiockpt.runtime.notes import name_ranks
from aiockpt.storage.backend import Backend

HEADER_LINES = 10
MOST_ROWS = 24
"""Ranks that are shown: drawing is most of what a look costs, and who waits the longest is above."""
MOST_SLOW = 3
"""Stragglers that are told, the slowest: one disk shows in several stages."""
_SHOWN_RANKS = 12


async def look_once(root: str, backend: Backend, as_json: bool) -> None:
    """Print how the job is now."""
    try:
        job = await JobWatch(backend).look()
    finally:
        await backend.close()
    show.json_or(as_json, job, lambda: show.out.print(view(root, job, height=1000)))


async def follow(root: str, backend: Backend, every_s: float) -> None:
    """Show how the job is, every *every_s* seconds, until the task is cancelled or the job has ended."""
    watch = JobWatch(backend)
    try:
        with Live(console=show.out, screen=True, auto_refresh=False) as live:
            while True:
                job = await watch.look()
                live.update(view(root, job, show.out.height), refresh=True)
                if job is not None and job.ended:
                    break
                await anyio.sleep(every_s)
        show.out.print(view(root, job, show.out.height))
    finally:
        with anyio.CancelScope(shield=True):
            await backend.close()


def view(root: str, job: JobNow | None, height: int) -> RenderableType:
    """Return *job* as lines and a table that fit into *height* lines."""
    if job is None:
        return Text.from_markup(
            f"[bold]{escape(root)}[/]   no rank has said anything yet: "
            + escape("Checkpointer(…, observers=[aiockpt.monitor.Heartbeat()])")
        )
    rows = sorted(job.ranks, key=_urgency)
    shown = rows[: max(1, min(MOST_ROWS, height - HEADER_LINES))]
    parts: list[RenderableType] = [_line(line) for line in _header(root, job)]
    parts.append(_table(shown))
    if len(rows) > len(shown):
        parts.append(_line(f"[dim]{show.count(len(rows) - len(shown), 'rank')} more, which wait less[/]"))
    return Group(*parts)


def _line(markup: str) -> Text:
    """Return one line, cut where the terminal ends: more lines would push the ranks out of it."""
    line = Text.from_markup(markup)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _urgency(rank: RankNow) -> tuple[bool, float, int]:
    """Return what sorts the silent first, then who waits the longest."""
    return (not rank.silent, -rank.oldest.for_s if rank.oldest is not None else 0.0, rank.beat.rank)


def _header(root: str, job: JobNow) -> list[str]:
    well = job.world_size - len(job.missing) - len(job.silent)
    state = "[dim]ended[/]" if job.ended else f"{well} of {show.count(job.world_size, 'rank')} heard"
    if job.durable_step is None or job.durable_s is None:
        durable = "[yellow]no step is durable yet[/]"
    else:
        durable = f"step [bold]{job.durable_step}[/] is durable, since {_time(job.durable_s)}"
    steps = ", ".join(map(str, job.in_flight)) or "none"
    lines = [
        f"[bold]{state}[/]   {escape(root)}",
        durable,
        f"in flight: {steps}   {show.speed(job.bytes_per_s)}   {show.count(job.failed, 'save')} failed, "
        f"{show.count(job.retried, 'call')} made again",
    ]
    for ranks, what in ((job.silent, "silent"), (job.missing, "never heard of")):
        if ranks:
            lines.append(f"[bold red]{what}: {name_ranks(ranks, _SHOWN_RANKS)}[/]")
    lines += [f"[yellow]{escape(explain(one))}[/]" for one in job.slow[:MOST_SLOW]]
    errors = {one.beat.last_error for one in job.ranks if one.beat.last_error}
    if errors:
        lines.append(f"[red]{escape(sorted(errors)[-1][:200])}[/]")
    return lines


def _table(ranks: list[RankNow]) -> Table:
    table = show.columns(
        "rank", "host", "doing", "for", "written", "speed", "durable", "heard",
        right=("rank", "for", "written", "speed", "durable", "heard"), folds="host",
    )  # fmt: skip
    for one in ranks:
        work, beat = one.oldest, one.beat
        doing = "[dim]ended[/]" if beat.ended else "[dim]nothing[/]"
        if work is not None:
            doing = f"{work.operation} {work.step}: {work.stage}"
        table.add_row(
            str(beat.rank),
            escape(beat.host),
            doing,
            "" if work is None else _time(work.for_s + one.heard_s),
            f"{show.size(work.done_bytes)} of {show.size(work.bytes)}" if work is not None and work.bytes else "",
            show.speed(beat.bytes_per_s) if beat.bytes_per_s else "",
            "" if beat.durable_step is None else str(beat.durable_step),
            f"[bold red]{_time(one.heard_s)} ago[/]" if one.silent else f"{_time(one.heard_s)} ago",
        )
    return table


def _time(seconds: float) -> str:
    """Return a time as an operator reads it: 4 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
