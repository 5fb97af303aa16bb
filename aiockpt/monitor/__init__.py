"""Monitoring: observers for a checkpointer (`aiockpt.events` defines what they receive), and analysis of their records.

- `TraceFile` writes every event of a process into a file beside the run.
- `Heartbeat` reports every few seconds what this rank does, for ``aiockpt top``.
- `Metrics` counts for Prometheus, and `Scalars` passes numbers by step to a logger of experiments.
- `Endpoint` reports over HTTP whether this rank is healthy; `OpenTelemetry` makes spans.
- `aiockpt.monitor.read_run` reads the files of all ranks, and of all starts of a run, as one on one clock.
"""

from aiockpt.monitor.endpoint import Endpoint
from aiockpt.monitor.heartbeat import Heartbeat
from aiockpt.monitor.metrics import Metrics, Scalars
from aiockpt.monitor.open_telemetry import OpenTelemetry
from aiockpt.monitor.trace import TraceFile

__all__ = ["Endpoint", "Heartbeat", "Metrics", "OpenTelemetry", "Scalars", "TraceFile"]
