"""Output of ``aiockpt top``: three lines of the job, and its ranks, the longest waiting first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aiockpt.errors import CheckpointError
from aiockpt.monitor.live_job import JobNow, JobWatch, RankNow
from aiockpt.monitor.stragglers import explain
from aiockpt.publish.receiver_notes import has_versions
from aiockpt.runtime.notes import name_ranks
from aiockpt.storage.backend import Backend
from aiockpt.tools.cli import show

if TYPE_CHECKING:
    from aiockpt.publish.published_place import PlaceNow, PlaceWatch

MOST_OF_A_CORE = 0.02
"""Share of a core that polling and drawing may use."""
UNANSWERED_S = 5.0
"""Seconds after which an unfinished poll is shown as such."""
MOST_SLOW = 3
"""Limit of stragglers that are shown, the slowest first: one disk shows in several stages."""
_SHOWN_RANKS = 12


async def _watch_of(backend: Backend) -> tuple[JobWatch | PlaceWatch, Callable[..., RenderableType]]:
    """Return what reads the state of a job, or of a place of versions, and what draws it."""
    if not await has_versions(backend):
        return JobWatch(backend), view
    from aiockpt.publish.published_place import PlaceWatch  # with torch, which a job's view does without
    from aiockpt.tools.cli.versions_view import view_place

    return PlaceWatch(backend), view_place


async def print_once(root: str, backend: Backend, as_json: bool) -> None:
    """Print the current state of the job, or of the place of versions."""
    try:
        watch, draw = await _watch_of(backend)
        job = await watch.poll()
    finally:
        await backend.close()
    show.json_or(as_json, job, lambda: show.out.print(draw(root, job, 1000)))


class _Poller:
    """Polls the job, and continues through failures and hangs of storage.

    Attributes:
        job: from the last successful poll, at the second *answered_s* of the monotonic clock.
        trouble: why the last poll failed; empty where it did not.
        pause_s: until the next poll: as requested, or longer where many ranks would exceed `MOST_OF_A_CORE`.
    """

    def __init__(self, watch: JobWatch | PlaceWatch, every_s: float) -> None:
        self._watch = watch
        self._every_s = self.pause_s = every_s
        self.job: JobNow | PlaceNow | None = None
        self.answered_s = time.monotonic()
        self.trouble = ""

    async def poll(self) -> None:
        """Poll once.

        Raises:
            CheckpointError: storage cannot be read.
        """
        self.job = await self._watch.poll()
        self.answered_s, self.trouble = time.monotonic(), ""

    async def go_on(self) -> None:
        """Poll until the job has ended."""
        while self.job is None or not self.job.ended:
            busy_s = time.process_time()
            await anyio.sleep(self.pause_s)  # the result is drawn meanwhile
            try:
                await self.poll()
            except (CheckpointError, OSError) as error:
                self.trouble = str(error)
            self.pause_s = max(self._every_s, (time.process_time() - busy_s) / MOST_OF_A_CORE)

    def unanswered(self) -> str:
        """Return a sentence on how long storage has not answered, where the view is stale; else empty."""
        silent_s = time.monotonic() - self.answered_s
        if not self.trouble and silent_s < self.pause_s + UNANSWERED_S:
            return ""
        why = self.trouble or "it hangs"
        return f"storage has not answered for {show.span(silent_s)}; shown is the last known state: {why}"


async def follow(root: str, backend: Backend, every_s: float) -> None:
    """Show the state of the job, every *every_s* seconds, until the task is cancelled or the job has ended.

    A screen is drawn only when its content has changed.

    Raises:
        CheckpointError: storage fails at the first poll. Later failures are shown, and the poll is repeated.
    """
    drawn: tuple[Any, str] | None = None
    try:
        watch, draw = await _watch_of(backend)
        poller = _Poller(watch, every_s)
        await poller.poll()
        with Live(console=show.out, screen=True, auto_refresh=False) as live:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(poller.go_on)
                while poller.job is None or not poller.job.ended:
                    job, trouble = poller.job, poller.unanswered()
                    if drawn is None or job is not drawn[0] or trouble != drawn[1]:
                        live.update(draw(root, job, show.out.height, trouble), refresh=True)
                        drawn = job, trouble
                    await anyio.sleep(every_s)
        show.out.print(draw(root, poller.job, show.out.height))
    finally:
        with anyio.CancelScope(shield=True):
            await backend.close()


def view(root: str, job: JobNow | None, height: int, trouble: str = "") -> RenderableType:
    """Return *job* as lines and a table that fit into *height* lines.

    Args:
        trouble: why the current state of the job is unknown.
    """
    if job is None and trouble:
        return Group(show.line(f"[bold]{escape(root)}[/]"), show.line(f"[bold red]{escape(trouble)}[/]"))
    if job is None:
        return Text.from_markup(
            f"[bold]{escape(root)}[/]   no rank has said anything yet: "
            + escape("Checkpointer(…, observers=[aiockpt.monitor.Heartbeat()])")
        )
    rows = sorted(job.ranks, key=_urgency)
    parts: list[RenderableType] = [show.line(f"[bold red]{escape(trouble)}[/]")] if trouble else []
    parts += [show.line(line) for line in _header(root, job)]
    shown = show.fitting(rows, height - len(parts))
    parts.append(_table(shown))
    if len(rows) > len(shown):
        parts.append(show.line(f"[dim]{show.count(len(rows) - len(shown), 'rank')} more, which have waited less[/]"))
    return Group(*parts)


def _urgency(rank: RankNow) -> tuple[bool, float, int]:
    """Return the sort key: silent ranks first, then the longest waiting."""
    return (not rank.silent, -rank.oldest.for_s if rank.oldest is not None else 0.0, rank.beat.rank)


def _header(root: str, job: JobNow) -> list[str]:
    well = sum(not rank.silent for rank in job.ranks)
    state = "[dim]ended[/]" if job.ended else f"{well} of {show.count(job.world_size, 'rank')} reporting"
    if job.durable_step is None or job.durable_s is None:
        durable = "[yellow]no step is durable yet[/]"
    else:
        durable = f"step [bold]{job.durable_step}[/] is durable, since {show.span(job.durable_s)}"
    steps = ", ".join(map(str, job.in_flight)) or "none"
    lines = [
        f"[bold]{state}[/]   {escape(root)}",
        durable,
        f"in flight: {steps}   {show.speed(job.bytes_per_s)}   {show.count(job.failed, 'save')} failed, "
        f"{show.count(job.retried, 'call')} retried",
    ]
    copied = {
        url: max(rank.beat.places.get(url, -1) for rank in job.ranks) for rank in job.ranks for url in rank.beat.places
    }
    if copied:
        lines.append(f"copied: {escape(', '.join(f'step {step} to {url}' for url, step in sorted(copied.items())))}")
    for ranks, what in (
        (job.doubled, "two processes report as one rank, so two jobs have one place"),
        (job.silent, "silent"),
        (job.missing, "no report yet"),
    ):
        if ranks:
            lines.append(f"[bold red]{what}: {name_ranks(ranks, _SHOWN_RANKS)}[/]")
    if job.damaged:
        more = f" and {len(job.damaged) - _SHOWN_RANKS} more" if len(job.damaged) > _SHOWN_RANKS else ""
        names = ", ".join(job.damaged[:_SHOWN_RANKS])
        lines.append(f"[bold red]damaged, or of another version of aiockpt: {escape(names)}{more}[/]")
    lines += [f"[yellow]{escape(explain(straggler))}[/]" for straggler in job.slow[:MOST_SLOW]]
    errors = {rank.beat.last_error for rank in job.ranks if rank.beat.last_error}
    if errors:
        lines.append(f"[red]{escape(sorted(errors)[-1][:200])}[/]")
    return lines


def _table(ranks: Sequence[RankNow]) -> Table:
    table = show.columns(
        "rank", "host", "doing", "for", "written", "speed", "durable", "report",
        right=("rank", "for", "written", "speed", "durable", "report"), folds="host",
    )  # fmt: skip
    for rank in ranks:
        work, beat = rank.oldest, rank.beat
        doing = "[dim]ended[/]" if beat.ended else "[dim]nothing[/]"
        if work is not None:
            doing = f"{work.operation} {work.step}: {work.stage}"
        table.add_row(
            str(beat.rank),
            escape(beat.host),
            doing,
            "" if work is None else show.span(work.for_s + rank.heard_s),
            f"{show.size(work.done_bytes)} of {show.size(work.bytes)}" if work is not None and work.bytes else "",
            show.speed(beat.bytes_per_s) if beat.bytes_per_s and not beat.ended else "",
            "" if beat.durable_step is None else str(beat.durable_step),
            f"[bold red]{show.span(rank.heard_s)} ago[/]" if rank.silent else f"{show.span(rank.heard_s)} ago",
        )
    return table
