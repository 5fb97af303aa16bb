"""The cadence of saves: read `cadence` (the loop, all ranks), `intervals` (the rules), `controller` (what is measured)."""

from aiockpt.policies.cadence.cadence import Cadence
from aiockpt.policies.cadence.intervals import Interval, Measured

__all__ = ["Cadence", "Interval", "Measured"]
