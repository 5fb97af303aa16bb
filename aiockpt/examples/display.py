"""What does the person in front of the demo see? Live progress on a terminal, plain lines elsewhere, then a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from aiockpt.examples.child import StepDone, Told
from aiockpt.examples.cost import Cost
from aiockpt.examples.outlook import tell
from aiockpt.examples.record import Record
from aiockpt.examples.verdict import Recovery
from aiockpt.units import size, speed

DIFFERENCES_SHOWN = 10


class Display(AbstractContextManager["Display"], Protocol):
    """Shows one phase of the demo after the other."""

    def begin(self, phase: str, steps: int = 0) -> None:
        """Show that *phase* runs; it takes *steps* training steps, if any."""

    def show(self, record: Record, told: Told) -> None:
        """Show what was just *told*; *record* has it already."""

    def expect(self, remaining_s: float | None) -> None:
        """Show how long all of it will still take; None while that is not known."""

    def finish(self, outcome: str) -> None:
        """Show how the phase ended."""


def training_text(done: StepDone, steps: int) -> str:
    """Say where the training is."""
    return f"step {done.step:>3}/{steps}   loss {done.loss:.4f}"


def saving_text(record: Record) -> str:
    """Say what the saves are doing: pause and bytes of the last one, speed of the last commit, and what is in flight."""
    snapshot, commit = record.last_snapshot, record.last_commit
    if snapshot is None:
        return ""
    parts = [f"save {snapshot.step}: pause {snapshot.pause_s * 1e3:.1f} ms, {size(snapshot.bytes)}"]
    if commit is not None:
        parts.append(speed(commit.bytes / commit.seconds))
    if record.in_flight or commit is None:
        parts.append(f"{record.in_flight} in flight")
    else:
        parts.append(f"committed {commit.step}")
    return " · ".join(parts)


class LiveDisplay:
    """Redraws all phases in place, ten times a second."""

    def __init__(self, console: Console, phases: Sequence[str]) -> None:
        self._spinner = Spinner("dots", style="cyan")
        self._outcomes: dict[str, str | None] = dict.fromkeys(phases)
        self._phase: str | None = None
        self._steps = 0
        self._record: Record | None = None
        self._remaining_s: float | None = None
        self._live = Live(console=console, get_renderable=self.draw, refresh_per_second=10)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, phase: str, steps: int = 0) -> None:
        self._phase, self._steps, self._record = phase, steps, None

    def show(self, record: Record, told: Told) -> None:
        self._record = record

    def expect(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def finish(self, outcome: str) -> None:
        assert self._phase is not None
        self._outcomes[self._phase] = outcome
        self._phase = None

    def draw(self) -> RenderableType:
        """Return all phases as they are now."""
        table = Table.grid(padding=(0, 1))
        for phase, outcome in self._outcomes.items():
            if outcome is not None:
                table.add_row(Text("✓", "green"), phase, Text(outcome))
            elif phase == self._phase:
                table.add_row(self._spinner, Text(phase, "bold"), self._progress())
            else:
                table.add_row(" ", Text(phase, "dim"), "")
        if self._phase is not None and self._remaining_s is not None:
            table.add_row(" ", Text("to go", "dim"), Text(tell(self._remaining_s), "dim"))
        return Padding(table, (0, 1))

    def _progress(self) -> RenderableType:
        record, done = self._record, self._record.last_step if self._record else None
        if record is None or done is None:
            return Text("starting" if self._steps else "", "dim")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(self._steps, done.step + 1, width=24), training_text(done, self._steps))
        saving = saving_text(record)
        return Group(bar, Text(saving, "cyan")) if saving else bar


class PlainDisplay:
    """Prints a line now and then: for logs, pipes and terminals that cannot redraw."""

    LINES = 6

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._steps = 0
        self._said_how_long = False

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, phase: str, steps: int = 0) -> None:
        self._phase, self._steps = phase, steps

    def show(self, record: Record, told: Told) -> None:
        if isinstance(told, StepDone) and told.step % max(1, self._steps // self.LINES) == 0:
            parts = [training_text(told, self._steps), saving_text(record)]
            self._print("   ".join(part for part in parts if part))

    def expect(self, remaining_s: float | None) -> None:
        if remaining_s is not None and not self._said_how_long:
            self._print(f"all of it will take {tell(remaining_s)} from here")
            self._said_how_long = True

    def finish(self, outcome: str) -> None:
        self._print(outcome)

    def _print(self, text: str) -> None:
        self._console.print(f"{self._phase}: {text}", highlight=False, soft_wrap=True)


def print_result(console: Console, recovery: Recovery, cost: Cost) -> None:
    """Print losses side by side, the figures, and the verdict."""
    exact = recovery.exact
    console.print()
    console.print(_loss_table(recovery))
    console.print()
    console.print(_figure_table([*_recovery_rows(recovery), ("", "", ""), *_cost_rows(cost)]))
    console.print()
    for it in recovery.differences[:DIFFERENCES_SHOWN]:
        console.print(f" {it.run}, step {it.step}: loss {it.actual!r} instead of {it.expected!r}", style="red")
    verdict = "The run went on as if it had never been killed." if exact else "THE LOSSES DIFFER."
    console.print(f" {verdict}", style="bold green" if exact else "bold red")


def _loss_table(recovery: Recovery) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="bold")
    for heading in ("step", "loss of the reference", "of the killed run", "of the resumed run"):
        table.add_column(heading, justify="right")
    for it in recovery.samples:
        table.add_row(
            str(it.step), repr(it.reference), _compared(it.killed, it.reference), _compared(it.resumed, it.reference)
        )
    return table


def _compared(loss: float | None, reference: float) -> Text:
    if loss is None:
        return Text("")
    return Text(repr(loss), "green" if loss == reference else "bold red")


def _figure_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 1))
    for question, answer, detail in rows:
        table.add_row(Text(question, "bold"), answer, Text(detail, "dim"))
    return table


def _recovery_rows(it: Recovery) -> list[tuple[str, str, str]]:
    same = it.compared_steps - len(it.differences)
    resumed_from = "nothing" if it.resumed_from is None else f"step {it.resumed_from}"
    return [
        (
            "killed in the save of",
            f"step {it.killed_in_save_of}",
            f"{size(it.written_bytes)} of {size(it.save_bytes)} written, no manifest",
        ),
        ("resumed from", resumed_from, f"the newest committed was {it.newest_committed}"),
        ("work lost", f"{it.lost_steps} steps", f"{it.lost_s:.1f} s of training, done again"),
        ("losses equal", f"{same} of {it.compared_steps}", "bit by bit, before and after the kill"),
    ]


def _cost_rows(it: Cost) -> list[tuple[str, str, str]]:
    pause, pause_max = it.pause_median_s * 1e3, it.pause_max_s * 1e3
    commit, commit_max = it.commit_median_s * 1e3, it.commit_max_s * 1e3
    disk = speed(it.disk_bytes_per_s) + ("" if it.disk_direct else ", page cache")
    return [
        ("steps and saves", f"{it.steps} and {it.saves}", "of both runs that saved"),
        (
            "training blocked",
            f"{it.blocked_fraction:.2%} of its time",
            f"{it.blocked_s:.3g} s of {it.run_s:.1f} s, by all saves together",
        ),
        ("pause per save", f"{pause:.1f} ms", f"median of {it.saves}, at most {pause_max:.1f} ms"),
        ("time to committed", f"{commit:.0f} ms", f"median, at most {commit_max:.0f} ms"),
        (
            "throughput of a save",
            speed(it.save_bytes_per_s),
            f"{it.save_bytes_per_s / it.disk_bytes_per_s:.0%} of the idle disk ({disk})",
        ),
        *_slowdown_rows(it),
    ]


def _slowdown_rows(it: Cost) -> list[tuple[str, str, str]]:
    """Return what is told against the noise; below it a figure would be the noise's own, and could be below 0."""
    noise = f"±{it.noise_fraction:.0%}"
    slowed, beside = "not measurable", f"less than the noise of {noise}"
    if it.slowed_s is not None and it.slowed_is_measurable:
        slowed, beside = f"{it.slowed_s * 1e3:+.1f} ms", "its steps against those around it"
    overhead = f"{it.overhead_fraction:+.1%}" if it.overhead_is_measurable else "not measurable"
    compared = f"{it.timed_steps} steps in {it.saving_s:.2f} s, without saves {it.plain_s:.2f} s"
    return [
        ("slowed by a save", slowed, beside),
        ("overhead on training", overhead, compared),
        ("noise of this machine", noise, f"steps of {it.step_s * 1e3:.0f} ms without saves"),
    ]
