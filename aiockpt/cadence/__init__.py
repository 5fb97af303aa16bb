"""When to save next? Read `intervals` (the rules), then `controller` (what is measured), then `cadence` (on all ranks)."""

from aiockpt.cadence.cadence import Cadence
from aiockpt.cadence.intervals import Interval, Measured

__all__ = ["Cadence", "Interval", "Measured"]
