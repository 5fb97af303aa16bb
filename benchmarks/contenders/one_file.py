"""What have the libraries in common that write one file? They flush nothing, so it is flushed here."""

from __future__ import annotations

from pathlib import Path

from benchmarks import pages
from benchmarks.contenders import Base, Pending


class OneFile(Base):
    """A library that writes one file and flushes nothing."""

    suffix: str

    def location(self, step: int) -> Path:
        """Return the file of *step*."""
        return self.folder / f"step-{step}.{self.suffix}"

    def unflushed(self, step: int) -> Pending:
        """Return the rest of a save whose file is written but not flushed."""

        def wait() -> None:
            pages.sync(self.location(step))
            pages.sync(self.folder)

        return Pending(lambda: True, wait)
