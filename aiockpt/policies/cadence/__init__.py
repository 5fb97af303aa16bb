"""The cadence of saves: read `cadence` (the loop, all ranks), `intervals` (the rules), `controller`, `by_time`."""

from aiockpt.policies.cadence.cadence import Cadence
from aiockpt.policies.cadence.intervals import Interval, Measured

__all__ = ["Cadence", "Interval", "Measured"]
