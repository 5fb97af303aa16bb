"""aiockpt as its users have it: the public names, all defaults."""

from __future__ import annotations

from pathlib import Path

import aiockpt
from benchmarks.contenders import DEADLINE_S, Base, Pending
from benchmarks.state import State


class Aiockpt(Base):
    """aiockpt through its public names, all defaults."""

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        self._checkpointer = aiockpt.Checkpointer(str(folder))
        self._checkpointer.__enter__()

    def warm_up(self, state: State) -> None:
        self._checkpointer.warm_up(state).result(DEADLINE_S)

    def save(self, step: int, state: State) -> Pending:
        saving = self._checkpointer.save(step, state)
        saving.snapshotted().result(0)  # an eager save has its snapshot when it returns
        return Pending(saving.done, lambda: saving.result(DEADLINE_S))

    def load(self, step: int, state: State) -> None:
        loaded = self._checkpointer.load(state).result(DEADLINE_S)
        if loaded is None or loaded.step != step:
            raise RuntimeError(f"loaded {loaded!r}, wanted step {step}")

    def location(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def budget_bytes(self) -> int:
        return int(self._checkpointer.statistics().pool.ceiling_bytes)

    def close(self) -> None:
        self._checkpointer.__exit__(None, None, None)
