"""Report of one run on a place: the stable schema of ``aiockpt bench --json``.

``schema`` is 1. A field is never renamed and never changes its unit or meaning under that number; new ones may be added.
Units are in the names: ``_bytes``, ``_s`` and ``_ms`` (wall), ``cpu_s`` (processor seconds of this process, user and
system, all threads, the verification's included), ``mb_per_s`` (10⁶ bytes). What was not measured is null or absent.

    {
      "schema": 1,
      "url": "s3://bucket/run", "backend": "<Retrying …>", "prefix": "aiockpt-bench-…",
      "scope": "shared", "durable": true, "plan": {…},
      "points": [{"operation": "write", "size_bytes": 16777216, "concurrency": 4,
                  "requests": 64, "bytes": 1073741824, "wall_s": 1.9, "cpu_s": 0.5,
                  "mb_per_s": 565.1, "requests_per_s": 33.6, "cpu_s_per_gib": 0.5,
                  "p50_ms": 110.2, "p95_ms": 140.7, "p99_ms": 151.0, "max_ms": 151.0,
                  "errors": {"throttle": 1}, "retries": 3, "wrong": 0}, …],
      "checks": [{"name": "one winner", "passed": true, "detail": "…"}, …],
      "skipped": [{"what": "raw disk", "why": "…"}, …],
      "floors": [{"name": "memory copy", "bytes_per_s": 1.9e10}, …],
      "soak": null | {…},
      "problems": ["…"]
    }

Operations of data files: ``create``, ``write`` (one block of at most 16 MiB: a part of a multipart upload), ``finish``,
``open``, ``read`` (one ranged read, the same blocks); ``size_bytes`` is that of the file. Of small objects: ``put``,
``get``, ``put_new`` (create exclusively), ``stat``, ``list`` (a folder of 100), ``delete`` (one); ``size_bytes`` is that of
the object. ``plan`` has the options that were used. ``problems`` is empty exactly when every check passed, no byte was
wrong, no operation was stopped for its failures, and no call of the soak failed after its retries.
"""

from __future__ import annotations

import msgspec

from aiockpt.tools.stress.plan import StressPlan


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One operation at one size and one concurrency.

    Attributes:
        requests: that succeeded; ``p50_ms`` … ``max_ms`` are theirs, including retries and their waits.
        bytes: that they moved; 0 for an operation that moves none.
        wall_s: of the whole point.
        cpu_s, cpu_s_per_gib: None where other operations ran in the same time (``create``, ``finish``, ``open``).
        errors: requests that failed, retried or not, by class of their error.
        retries: further attempts, where the backend retries.
        wrong: reads that returned other bytes than were written.
    """

    operation: str
    size_bytes: int
    concurrency: int
    requests: int
    bytes: int
    wall_s: float
    cpu_s: float | None
    mb_per_s: float | None
    requests_per_s: float
    cpu_s_per_gib: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    errors: dict[str, int]
    retries: int
    wrong: int

    @property
    def mib_per_s(self) -> float | None:
        """``mb_per_s`` in the unit of the display."""
        return None if self.mb_per_s is None else self.mb_per_s * 1e6 / 2**20


class StorageCheck(msgspec.Struct, frozen=True):
    """A check of a property that commits rely on."""

    name: str
    passed: bool
    detail: str


class Skipped(msgspec.Struct, frozen=True):
    """A skipped measurement, and the reason."""

    what: str
    why: str


class Floor(msgspec.Struct, frozen=True):
    """A figure of this machine alone, for context."""

    name: str
    bytes_per_s: float


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """A mixed workload with faults injected below the retries; every byte read was compared.

    Attributes:
        seed, fraction: of the faults, to repeat them.
        calls: of the workload; *attempts*: those made for them, retries included.
        injected: number of faults, by kind and verb.
        retried, recovered: calls that needed another attempt; those of them that succeeded.
        reread: blocks and objects that were damaged in one read and intact in a later one.
        errors: calls that failed in the end, by class.
        wrong: violations of the guarantees, a sentence each.
    """

    seed: int
    fraction: float
    wall_s: float
    calls: int
    attempts: int
    files: int
    objects: int
    bytes_written: int
    bytes_read: int
    injected: dict[str, int]
    retried: int
    recovered: int
    reread: int
    errors: dict[str, int]
    wrong: list[str]


class StressReport(msgspec.Struct, kw_only=True):
    """One run; see the module for the schema."""

    schema: int = 1
    url: str
    backend: str
    prefix: str
    scope: str
    durable: bool
    plan: StressPlan
    points: list[Point] = []
    checks: list[StorageCheck] = []
    skipped: list[Skipped] = []
    floors: list[Floor] = []
    soak: Soak | None = None
    problems: list[str] = []
