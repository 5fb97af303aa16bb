"""Monitoring: observers for a checkpointer (`aiockpt.events` defines what they receive), and analysis of their records.

- `TraceFile` writes every event of a process into a file beside the run.
- `Heartbeat` reports every few seconds what this rank does, for ``aiockpt top``.
- `Metrics` counts events for Prometheus, and `Scalars` passes numbers by step to an experiment logger.
- `Endpoint` reports over HTTP whether this rank is healthy; `OpenTelemetry` makes spans.
- `aiockpt.monitor.read_run` merges the files of all ranks and all starts of a run, on one clock.
"""

from aiockpt.monitor.endpoint import Endpoint
from aiockpt.monitor.heartbeat import Heartbeat
from aiockpt.monitor.metrics import Metrics, Scalars
from aiockpt.monitor.open_telemetry import OpenTelemetry
from aiockpt.monitor.trace import TraceFile

__all__ = ["Endpoint", "Heartbeat", "Metrics", "OpenTelemetry", "Scalars", "TraceFile"]
