"""Two slips that the saves of a run show by themselves, each logged once: work behind a save, and a loader that never moves.

- A program saves, and works on before it takes the next batch (trains the batch, steps a schedule, evaluates at the end of
  an epoch). A resume goes on with that next batch, without this work.
- A loader of the state hands out nothing from one save to the next, because the program iterates over the source in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aiockpt.data.loader import Loader

if TYPE_CHECKING:
    from aiockpt.session.reached_state import ReachedState

logger = logging.getLogger("aiockpt")


class LoopWatch:
    """The loaders in the states that one checkpointer saves; those in nested dicts are not looked at.

    States are compared after the first save within a loop, and after each one behind a loop: some microseconds a tensor.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._has_warned = self._has_moved = self._was_within = False

    def saved(self, step: int, state: Mapping[str, Any]) -> None:
        """Look at the loaders of *state*, which is being saved as *step*."""
        if loaders := [value for value in state.values() if isinstance(value, Loader)]:
            self._look_at(loaders, step, state)

    def _look_at(self, loaders: list[Loader[Any]], step: int, state: Mapping[str, Any]) -> None:
        if not self._has_moved:
            self._check_moved(step, loaders)
        moving = [one for one in loaders if one.is_read_in_order]
        if not moving or self._has_warned or (self._was_within and not moving[0].is_between_loops):
            return
        self._was_within |= not moving[0].is_between_loops
        # Not for every program: it is a part of the handling of preemptions.
        from aiockpt.session.reached_state import ReachedState

        noted = {name: (value, ReachedState()) for name, value in state.items() if not isinstance(value, Loader)}
        for name, (value, reached) in noted.items():
            reached.note({name: value})
        where = "behind" if moving[0].is_between_loops else "within"
        moving[0].before_next = partial(self._check_unchanged, step, where, state, noted)

    def _check_moved(self, step: int, loaders: list[Loader[Any]]) -> None:
        """Warn at the second step if no batch was taken from any of *loaders*."""
        self._has_moved = any(one.has_moved for one in loaders)
        if self._first_step is None:
            self._first_step = step
        elif step != self._first_step and not self._has_moved:
            self._has_moved = True
            logger.warning(
                "steps %d and %d were saved, and no batch came from the Loader in the state: its position does not move. "
                "Write `for batch in loader` with the aiockpt.Loader, not with the DataLoader that it wraps",
                *(self._first_step, step),
            )

    def _check_unchanged(
        self, step: int, where: str, state: Mapping[str, Any], noted: Mapping[str, tuple[Any, ReachedState]]
    ) -> None:
        changed = [
            name
            for name, (value, reached) in noted.items()
            # The note has a number of the state itself as it was.
            if (isinstance(value, int | float) and state.get(name) != value)
            or (reached.is_known and reached.has_changed())
        ]
        for _, reached in noted.values():
            reached.release()
        if changed and not self._has_warned:
            self._has_warned = True
            what = "batch" if where == "within" else "loop"
            logger.warning(
                "step %d was saved %s a loop over its loader, and %s changed before the next %s. A resume from step %d goes "
                "on with that %s: what changed them must stand before the save%s",
                *(step, where, ", ".join(map(repr, changed)), what, step, what),
                "" if where == "within" else ", or at the beginning of an epoch",
            )
