"""Who watches? Observers to give to a checkpointer (`aiockpt.events` says what they see), and what is made of it afterwards.

- `TraceFile` writes every event of a process into a file beside the run.
- `aiockpt.monitor.run_log` reads those of all ranks, and of all starts of a run, as one.
"""

from aiockpt.monitor.trace import TraceFile

__all__ = ["TraceFile"]
