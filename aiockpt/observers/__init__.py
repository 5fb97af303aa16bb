"""Who watches? Observers to give to a checkpointer (`aiockpt.events` says what they see)."""

from aiockpt.observers.trace import TraceFile

__all__ = ["TraceFile"]
