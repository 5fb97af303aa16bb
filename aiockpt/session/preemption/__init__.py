"""Preemption, the end of a run on request: `policy` (what is asked for), `handler`, `last_call` (the last call)."""

from aiockpt.session.preemption.policy import Preempted, Preemption

__all__ = ["Preempted", "Preemption"]
