"""When to save next? Read `intervals` (the rules), then `controller` (measuring, steadily), then `cadence` (on all ranks)."""

from aiockpt.cadence.cadence import Cadence
from aiockpt.cadence.intervals import Interval, Measured

__all__ = ["Cadence", "Interval", "Measured"]
