"""How does a step that was copied look?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from aiockpt.cli.outcomes import note_left_out
from aiockpt.cli.show import say, size, speed

if TYPE_CHECKING:
    from aiockpt.engine.keep import Copied


def show_copied(copied: Copied, left_out: int) -> None:
    """Print one line about a step that is in another place now, and how many names it was saved without."""
    where = escape(copied.url)
    if copied.existed:
        say(f"[dim]– step {copied.step}: in {where} already[/]")
        return
    took = f"{copied.seconds:.2f} s ({speed(copied.bytes / max(copied.seconds, 1e-9))})"
    say(f"[green]✓ step {copied.step}:[/] in {where}, {size(copied.bytes)} in {took}, verified")
    note_left_out(left_out, f"step {copied.step}")
