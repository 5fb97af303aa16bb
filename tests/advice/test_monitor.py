"""The advice of what watches a run, carried out where it is given."""

import logging
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

import aiockpt
from aiockpt.monitor import Endpoint, Metrics, TraceFile
from aiockpt.prove.proof import _check_straight
from tests.advice.carry_out import Entry, carry_out, names_of
from tests.watch import until

__all__ = ["Metrics", "SimpleNamespace", "TraceFile"]  # for lines


def listen(*, beside: bool) -> None:
    """Let a second endpoint listen on the port of the first, or on one of its own; return when it does, or is reported."""
    first, told = Endpoint(0), logging.getLogger("aiockpt").handlers[-1:]
    with aiockpt.Checkpointer("a", observers=[first]):
        until(lambda: first.port, "it listens")
        second = Endpoint(0 if beside else first.port)
        with aiockpt.Checkpointer("b", observers=[second]):
            until(
                lambda: second.port not in (0, first.port) or any(getattr(one, "lines", ()) for one in told),
                "it listens, or is reported",
            )


def check_proof(committed: list[int]) -> None:
    """Raise where a script of one rank that committed these steps proves nothing."""
    start: Any = SimpleNamespace(status=0, tail="", ranks=[0], committed=committed)
    _check_straight(start)


REGISTRY = prometheus_client.CollectorRegistry
TABLE = [
    Entry("Endpoint(1 << 16)", r"a port, from (\d+) \(any free one\) to 65535", "Endpoint({})"),
    Entry("Endpoint(0, overdue_s=-1)", r"Endpoint\(overdue_s=\S+\): give (seconds), more than 0",
          "Endpoint(0, overdue_s=1.0)  # {}"),
    Entry("listen(beside=False)", r"Endpoint\(9464 \+ local_rank\); (Endpoint\()0\) chooses a free one",
          "assert '{}'\nlisten(beside=True)"),
    Entry("one = REGISTRY()\nMetrics(one)\nMetrics(one)",
          r"use a separate registry, (Metrics\()CollectorRegistry\(\)\), which", "{}REGISTRY())"),
    Entry("command('aiockpt report run')", r"observers=\[(aiockpt\.monitor\.TraceFile\(\))\]\), which writes",
          "with aiockpt.Checkpointer('b', observers=[{}]) as b: b.save(1, state).result()\ncommand('aiockpt report b')"),
    Entry("TraceFile(mesh=SimpleNamespace(mesh_dim_names=None))",
          r"its dimensions have no names: init_device_mesh\(…, (mesh_dim_names=)",
          "TraceFile(mesh=SimpleNamespace({}('rank',), get_coordinate=lambda: [0]))"),
    Entry("check_proof([])", r"the script saved nothing: call (ckpt\.save\()\)",
          "{}3, state).result()\ncheck_proof([3])"),
]  # fmt: skip


@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)
