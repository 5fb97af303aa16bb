"""Output of ``aiockpt top``: three lines of the job, and its ranks, the longest waiting first."""

from __future__ import annotations

import time

import anyio
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aiockpt.errors import CheckpointError
from aiockpt.monitor.live_job import JobNow, JobWatch, RankNow
from aiockpt.monitor.stragglers import explain
from aiockpt.runtime.notes import name_ranks
from aiockpt.storage.backend import Backend
from aiockpt.tools.cli import show

TABLE_LINES = 2
"""Lines around the ranks: the column names, and the number of ranks that are not shown."""
MOST_ROWS = 20
"""Limit of ranks that are shown: drawing dominates the cost of a poll, and the longest waiting come first."""
MOST_OF_A_CORE = 0.02
"""Share of a core that polling and drawing may use."""
UNANSWERED_S = 5.0
"""Seconds after which an unfinished poll is shown as such."""
MOST_SLOW = 3
"""Limit of stragglers that are shown, the slowest first: one disk shows in several stages."""
_SHOWN_RANKS = 12


async def print_once(root: str, backend: Backend, as_json: bool) -> None:
    """Print the current state of the job."""
    try:
        job = await JobWatch(backend).poll()
    finally:
        await backend.close()
    show.json_or(as_json, job, lambda: show.out.print(view(root, job, height=1000)))


class _Poller:
    """Polls the job, and continues through failures and hangs of storage.

    Attributes:
        job: from the last successful poll, at the second *answered_s* of the monotonic clock.
        trouble: why the last poll failed; empty where it did not.
        pause_s: until the next poll: as requested, or longer where many ranks would exceed `MOST_OF_A_CORE`.
    """

    def __init__(self, backend: Backend, every_s: float) -> None:
        self._watch = JobWatch(backend)
        self._every_s = self.pause_s = every_s
        self.job: JobNow | None = None
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
        return f"storage has not answered for {_time(silent_s)}; shown is the last known state: {self.trouble or 'it hangs'}"


async def follow(root: str, backend: Backend, every_s: float) -> None:
    """Show the state of the job, every *every_s* seconds, until the task is cancelled or the job has ended.

    A screen is drawn only when its content has changed.

    Raises:
        CheckpointError: storage fails at the first poll. Later failures are shown, and the poll is repeated.
    """
    poller = _Poller(backend, every_s)
    drawn: tuple[JobNow | None, str] | None = None
    try:
        await poller.poll()
        with Live(console=show.out, screen=True, auto_refresh=False) as live:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(poller.go_on)
                while poller.job is None or not poller.job.ended:
                    job, trouble = poller.job, poller.unanswered()
                    if drawn is None or job is not drawn[0] or trouble != drawn[1]:
                        live.update(view(root, job, show.out.height, trouble), refresh=True)
                        drawn = job, trouble
                    await anyio.sleep(every_s)
        show.out.print(view(root, poller.job, show.out.height))
    finally:
        with anyio.CancelScope(shield=True):
            await backend.close()


def view(root: str, job: JobNow | None, height: int, trouble: str = "") -> RenderableType:
    """Return *job* as lines and a table that fit into *height* lines.

    Args:
        trouble: why the current state of the job is unknown.
    """
    if job is None and trouble:
        return Group(_line(f"[bold]{escape(root)}[/]"), _line(f"[bold red]{escape(trouble)}[/]"))
    if job is None:
        return Text.from_markup(
            f"[bold]{escape(root)}[/]   no rank has said anything yet: "
            + escape("Checkpointer(…, observers=[aiockpt.monitor.Heartbeat()])")
        )
    rows = sorted(job.ranks, key=_urgency)
    parts: list[RenderableType] = [_line(f"[bold red]{escape(trouble)}[/]")] if trouble else []
    parts += [_line(line) for line in _header(root, job)]
    shown = rows[: max(1, min(MOST_ROWS, height - len(parts) - TABLE_LINES))]
    parts.append(_table(shown))
    if len(rows) > len(shown):
        parts.append(_line(f"[dim]{show.count(len(rows) - len(shown), 'rank')} more, which have waited less[/]"))
    return Group(*parts)


def _line(markup: str) -> Text:
    """Return one line, cut at the width of the terminal: further lines would push the ranks off the screen."""
    line = Text.from_markup(markup)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _urgency(rank: RankNow) -> tuple[bool, float, int]:
    """Return the sort key: silent ranks first, then the longest waiting."""
    return (not rank.silent, -rank.oldest.for_s if rank.oldest is not None else 0.0, rank.beat.rank)


def _header(root: str, job: JobNow) -> list[str]:
    well = sum(not rank.silent for rank in job.ranks)
    state = "[dim]ended[/]" if job.ended else f"{well} of {show.count(job.world_size, 'rank')} reporting"
    if job.durable_step is None or job.durable_s is None:
        durable = "[yellow]no step is durable yet[/]"
    else:
        durable = f"step [bold]{job.durable_step}[/] is durable, since {_time(job.durable_s)}"
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


def _table(ranks: list[RankNow]) -> Table:
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
            "" if work is None else _time(work.for_s + rank.heard_s),
            f"{show.size(work.done_bytes)} of {show.size(work.bytes)}" if work is not None and work.bytes else "",
            show.speed(beat.bytes_per_s) if beat.bytes_per_s and not beat.ended else "",
            "" if beat.durable_step is None else str(beat.durable_step),
            f"[bold red]{_time(rank.heard_s)} ago[/]" if rank.silent else f"{_time(rank.heard_s)} ago",
        )
    return table


def _time(seconds: float) -> str:
    """Return a time as operators read it: 4 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
