"""A run that is told to end: read `policy` (what is asked for), `handler` (what happens), `last_call` (the last call)."""

from aiockpt.session.preemption.policy import Preempted, Preemption

__all__ = ["Preempted", "Preemption"]
