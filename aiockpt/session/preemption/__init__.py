"""Preemption, the end of a run on request: `policy` (the options), `handler` (the request, and the last call)."""

from aiockpt.session.preemption.policy import Preempted, Preemption

__all__ = ["Preempted", "Preemption"]
