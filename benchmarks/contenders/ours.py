"""aiockpt through its public names, with all defaults but those that the contender's name states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiockpt
from aiockpt.events import BarrierWaited, Event
from benchmarks.contenders import DEADLINE_S, Contender, Pending
from benchmarks.state import State


class Aiockpt(Contender):
    """aiockpt through its public names.

    Args:
        newest: keep the newest checkpoint only.
        immutable: declare that the state only changes where an optimizer's step is a barrier.
        options: of the checkpointer.
    """

    def __init__(self, *, newest: bool = False, immutable: bool = False, **options: Any) -> None:
        self._options = options
        self._immutable = immutable
        if newest:
            self._options["retention"] = aiockpt.Retention(last=1)
        self._waits_s: list[float] = []

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        if self._immutable:
            self._options["lazy"] = aiockpt.Lazy(immutable=list(state))
        if self._options.get("snapshot") == "lazy":
            self._options["observers"] = [self]
        self.checkpointer = aiockpt.Checkpointer(self.place(folder), **self._options)
        self.checkpointer.__enter__()

    def place(self, folder: Path) -> Any:
        """Return the place of the checkpoints."""
        return str(folder)

    def on_event(self, event: Event) -> None:
        if isinstance(event, BarrierWaited):
            self._waits_s.append(event.seconds)

    def warm_up(self, state: State) -> None:
        self.checkpointer.warm_up(state).result(DEADLINE_S)

    def save(self, step: int, state: State) -> Pending:
        saving = self.checkpointer.save(step, state)
        if "snapshot" not in self._options:
            saving.snapshotted().result(0)  # an eager save has its snapshot when it returns
        return Pending(saving.done, lambda: saving.result(DEADLINE_S))

    def load(self, step: int, state: State) -> None:
        loaded = self.checkpointer.load(state).result(DEADLINE_S)
        if loaded is None or loaded.step != step:
            raise RuntimeError(f"loaded {loaded!r}, wanted step {step}")
        self.read_bytes = loaded.read_bytes

    def location(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def budget_bytes(self) -> int:
        return int(self.checkpointer.statistics().pool.ceiling_bytes)

    def loop_cpu_s(self) -> float:
        return self.checkpointer._engine.loop.cpu_s()

    def take_waits(self) -> list[float]:
        waits_s, self._waits_s = self._waits_s, []
        return waits_s

    def settle(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.__exit__(None, None, None)
