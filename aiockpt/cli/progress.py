"""How far is long work? A bar on a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bytes_progress(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar for *total* bytes on standard error while the block runs; call what it yields with each advance."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
