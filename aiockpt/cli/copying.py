"""How does a step that was copied look?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from aiockpt.cli.show import say, size, speed

if TYPE_CHECKING:
    from aiockpt.engine.keep import Copied


def show_copied(copied: Copied) -> None:
    """Print one line about a step that is in another place now."""
    where = escape(copied.url)
    if copied.existed:
        say(f"[dim]– step {copied.step}: in {where} already[/]")
        return
    took = f"{copied.seconds:.2f} s ({speed(copied.bytes / max(copied.seconds, 1e-9))})"
    say(f"[green]✓ step {copied.step}:[/] in {where}, {size(copied.bytes)} in {took}, verified")
