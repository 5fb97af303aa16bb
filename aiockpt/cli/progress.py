"""How far is long work? A bar on a terminal, nothing in a pipe; and control-C ends the work, not only the waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from aiockpt.cli.show import speed

if TYPE_CHECKING:
    from aiockpt.runtime.future import Future

T = TypeVar("T")


class SpeedColumn(ProgressColumn):
    """The speed so far, in the units of everything else; rich's own column counts in powers of ten."""

    def render(self, task: Task) -> Text:
        """Return the speed of *task*; nothing while it is not known."""
        bytes_per_s = task.finished_speed or task.speed
        return Text("" if bytes_per_s is None else speed(bytes_per_s), style="progress.data.speed")


@contextmanager
def bytes_progress(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar for *total* bytes on standard error while the block runs; call what it yields with each advance."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        SpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def finish(future: Future[T]) -> T:
    """Wait for *future* and return its value; when the wait is interrupted the work is cancelled too."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
