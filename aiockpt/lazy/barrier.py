"""Keeps optimizers from changing what is still being copied, without the program doing anything for it.

While a snapshot is copied on another thread, a global pre-hook of optimizer steps blocks every optimizer of the process
until the *whole* state is copied. Guarantees:

- What devices will copy by themselves blocks no optimizer on the host: its compute stream waits for them, in its place.
- The hook comes with the first checkpointer of the process and stays: optimizers walk torch's hooks without a lock, and one
  that is added or removed meanwhile, by whoever begins or finishes a copy, makes ``step()`` raise on another thread. While
  nothing is copied it costs a step less than a microsecond.
- A save that begins inside an optimizer's step, in its closure or in a hook of it, does not block that step: our hook has
  been passed. `in_optimizer_step` tells, by the frames of the caller, which no exception can leave behind.

What else waits for a copy, and how, is in `aiockpt.runtime.pending_copies`.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aiockpt.runtime.loop import Mutex, refuse_on_loop_thread
from aiockpt.runtime.pending_copies import PendingCopies, pending_copies

_installing = Mutex()
_hook: RemovableHandle | None = None


def install_hook() -> None:
    """Have every step of every optimizer of this process wait for what is being copied. Idempotent."""
    global _hook
    with _installing:
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: Any) -> None:
    for copies in pending_copies():
        _order_step(copies)


def _order_step(copies: PendingCopies) -> None:
    """Let no step that the calling thread begins now overtake a copy; block only for what the host has left to copy."""
    copies.tell_change()
    for copy in copies.copying:
        refuse_on_loop_thread("an optimizer's step while a snapshot is being copied")
        copies.wait_for(copy, copy.host_copied)
        if copy.host_copied.is_settled:
            for event in copy.host_copied.value:
                event.order_before_compute()
    copies.recheck()


_STEP = Optimizer.profile_hook_step(lambda _: None).__code__
"""Of what torch wraps every optimizer's step in: it calls the hooks, then the step."""


def in_optimizer_step() -> bool:
    """Say whether the calling thread is inside the step of an optimizer of torch: in its closure, or in a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None
