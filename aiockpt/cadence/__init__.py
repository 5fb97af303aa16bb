"""When to save next? Read `cadence` (the loop, and all ranks), `intervals` (the rules), `controller` (the measuring)."""

from aiockpt.cadence.cadence import Cadence
from aiockpt.cadence.intervals import Interval, Measured

__all__ = ["Cadence", "Interval", "Measured"]
