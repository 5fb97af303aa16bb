"""When to save next? Read `cadence` (the loop, all ranks), `intervals` (the rules), `controller`, `by_time`."""

from aiockpt.cadence.cadence import Cadence
from aiockpt.cadence.intervals import Interval, Measured

__all__ = ["Cadence", "Interval", "Measured"]
