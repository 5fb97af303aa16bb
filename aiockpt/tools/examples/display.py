"""Display of the demo: live progress on a terminal, plain lines elsewhere, then tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aiockpt.events import Committed, SnapshotTaken
from aiockpt.tools.examples.child import DemoEvent, RankRecord, StepDone
from aiockpt.tools.examples.figures import Figures
from aiockpt.units import size, speed

DIFFERENCES_SHOWN = 10
LINES = 6
"""Lines of a phase, where they are not redrawn."""
ENOUGH_STEPS = 5
"""The first steps of a process are slow; after so many of them the remaining time is shown."""


def saving_text(record: RankRecord) -> str:
    """Return the state of the saves: pause and bytes of the last one, speed of the last commit, saves in flight."""
    snapshot, commit = record.newest(SnapshotTaken), record.newest(Committed)
    if snapshot is None:
        return ""
    parts = [f"save {snapshot.step}: pause {snapshot.pause_s * 1e3:.1f} ms, {size(snapshot.bytes)}"]
    if commit is not None:
        parts.append(speed(commit.bytes / commit.seconds))
    idle = commit is not None and not record.in_flight
    return " · ".join([*parts, f"committed {commit.step}" if commit and idle else f"{record.in_flight} in flight"])


def about(seconds: float) -> str:
    """Return a rough time in words."""
    return f"about {seconds / 60:.0f} minutes" if seconds >= 120 else f"about {max(1, round(seconds)):d} s"


class _Phase(ProgressColumn):
    """A bar and the first line of the text, the others below; for a phase that has ended, the text alone."""

    def render(self, task: Task) -> RenderableType:
        if task.finished or not task.total:
            return Text(task.fields["text"])
        first, *others = task.fields["text"].split("\n")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(task.total, task.completed, 24), first)
        return Group(bar, *map(Text, others))


class Display(Progress):
    """Shows the phases of a demo one after the other; *phases* has the number of steps of each, if any.

    Redrawn in place on a terminal; occasional lines elsewhere, and with *plain*.
    """

    def __init__(self, console: Console, phases: Mapping[str, int], *, plain: bool) -> None:
        columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), _Phase())
        super().__init__(
            *columns, console=console, disable=plain or not console.is_terminal, speed_estimate_period=3600
        )
        self._all = self.add_task("", total=sum(phases.values()), visible=False)
        self._rows = {
            name: self.add_task(name, total=steps or None, text="", visible=False) for name, steps in phases.items()
        }
        self._said_how_long = False

    def begin(self, phase: str) -> None:
        """Show that *phase* runs."""
        self._phase = phase
        self.update(self._rows[phase], visible=True, text="starting")

    def show(self, record: RankRecord, event: DemoEvent, steps: int) -> None:
        """Show an event of a run of so many steps; *record* has it already."""
        done, row = record.newest(StepDone), self._rows[self._phase]
        if done is None:
            return
        training, saving = f"step {done.step:>3}/{steps}   loss {done.loss:.4f}", saving_text(record)
        if isinstance(event, StepDone):
            self.advance(row)
            self.advance(self._all)
            if done.step % max(1, steps // LINES) == 0:
                self._print("   ".join(filter(None, (training, saving))))
        left = about(self.left_s) if self.left_s is not None else ""
        self.update(row, text="\n".join(filter(None, (training, saving, left and f"{left} to go"))))
        if left and not self._said_how_long:
            self._print(f"all of it will take {left} from here")
            self._said_how_long = True

    @property
    def left_s(self) -> float | None:
        """Remaining time of all steps; None while unknown."""
        task = next(task for task in self.tasks if task.id == self._all)
        return task.time_remaining if task.completed >= ENOUGH_STEPS else None

    def finish(self, outcome: str) -> None:
        """Show the outcome of the phase; its remaining steps no longer count as to come."""
        row = next(task for task in self.tasks if task.id == self._rows[self._phase])
        total = next(task for task in self.tasks if task.id == self._all)
        # set, not updated: an update would lose the speed of the steps
        total.total = (total.total or 0) - (row.total or 0) + row.completed
        self.update(row.id, total=max(1, row.completed), completed=max(1, row.completed), text=outcome)
        self._print(outcome)

    def _print(self, text: str) -> None:
        if self.disable:
            self.console.print(f"{self._phase}: {text}", highlight=False, markup=False, soft_wrap=True)


def table_of(headings: Iterable[str], rows: Iterable[Iterable[RenderableType]], left: str = "") -> Table:
    """Return a table whose columns, but for the one called *left*, are aligned at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0 if left else 1), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_result(console: Console, recovery: Figures, cost: Figures) -> None:
    """Print losses side by side, the figures, and the verdict."""

    def compared(loss: float | None, reference: float) -> Text:
        return Text("" if loss is None else repr(loss), "green" if loss == reference else "bold red")

    losses: list[tuple[RenderableType, ...]] = [
        (str(it["step"]), repr(it["reference"]), *(compared(it[run], it["reference"]) for run in ("killed", "resumed")))
        for it in recovery["samples"]
    ]
    headings = ("step", "loss of the reference", "of the killed run", "of the resumed run")
    figures = Table(show_header=False, box=None, padding=(0, 2, 0, 1))
    for question, answer, detail in [*_recovery_rows(recovery), ("", "", ""), *_cost_rows(cost)]:
        figures.add_row(Text(question, "bold"), answer, Text(detail, "dim"))
    console.print("", table_of(headings, losses), "", figures, "", sep="\n")
    for it in recovery["differences"][:DIFFERENCES_SHOWN]:
        line = " {run}, step {step}: loss {actual!r} instead of {expected!r}".format_map(it)
        console.print(line, style="red")
    verdict = " The run went on as if it had never been killed." if recovery["exact"] else " THE LOSSES DIFFER."
    console.print(verdict, style="bold green" if recovery["exact"] else "bold red")


def _recovery_rows(it: Figures) -> Iterator[tuple[str, str, str]]:
    written, whole = size(it["written_bytes"]), size(it["save_bytes"])
    found = "nothing" if it["resumed_from"] is None else f"step {it['resumed_from']}"
    same = it["compared_steps"] - len(it["differences"])
    yield "killed in the save of", f"step {it['killed_in_save_of']}", f"{written} of {whole} written, no manifest"
    yield "resumed from", found, f"the newest committed was {it['newest_committed']}"
    yield "work lost", f"{it['lost_steps']} steps", f"{it['lost_s']:.1f} s of training, done again"
    yield "losses equal", f"{same} of {it['compared_steps']}", "bit by bit, before and after the kill"


def _cost_rows(it: Figures) -> Iterator[tuple[str, str, str]]:
    """Yield the figures; one below the noise could be negative and means nothing, so it is not shown."""
    pause, pause_max, commit, commit_max, slowed, step = (
        (it[name] or 0) * 1e3
        for name in ("pause_median_s", "pause_max_s", "commit_median_s", "commit_max_s", "slowed_s", "step_s")
    )
    disk, noise = (
        speed(it["disk_bytes_per_s"]) + ", page cache" * (not it["disk_direct"]),
        f"±{it['noise_fraction']:.0%}",
    )
    blocked = f"{it['blocked_s']:.3g} s of {it['run_s']:.1f} s, by all saves together"
    of_disk = f"{it['save_bytes_per_s'] / it['disk_bytes_per_s']:.0%} of the idle disk ({disk})"
    overhead = f"{it['overhead_fraction']:+.1%}" if it["overhead_is_measurable"] else "not measurable"
    timed = f"{it['timed_steps']} steps in {it['saving_s']:.2f} s, without saves {it['plain_s']:.2f} s"
    yield "steps and saves", f"{it['steps']} and {it['saves']}", "of both runs that saved"
    yield "training blocked", f"{it['blocked_fraction']:.2%} of its time", blocked
    yield "pause per save", f"{pause:.1f} ms", f"median of {it['saves']}, at most {pause_max:.1f} ms"
    yield "time to committed", f"{commit:.0f} ms", f"median, at most {commit_max:.0f} ms"
    yield "throughput of a save", speed(it["save_bytes_per_s"]), of_disk
    if it["slowed_is_measurable"]:
        yield "slowed by a save", f"{slowed:+.1f} ms", "its steps against those around it"
    else:
        yield "slowed by a save", "not measurable", f"less than the noise of {noise}"
    yield "overhead on training", overhead, timed
    yield "noise of this machine", noise, f"steps of {step:.0f} ms without saves"
