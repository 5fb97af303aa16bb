"""Report of one run on a place: the stable schema of ``aiockpt bench --json``.

``schema`` is 1. A field is never renamed and never changes its unit or meaning under that number; new ones may be added.
Units are in the names: ``_bytes``, ``_s`` and ``_ms`` (wall), ``cpu_s`` (processor seconds of this process, user and
system, all threads, the verification's included), ``mb_per_s`` (10⁶ bytes). What was not measured is null or absent. The
members are those of the structs below, from `StressReport` down.

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


class Soak(msgspec.Struct, kw_only=True):
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
    wall_s: float = 0.0
    calls: int = 0
    attempts: int = 0
    files: int = 0
    objects: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    injected: dict[str, int] = {}
    retried: int = 0
    recovered: int = 0
    reread: int = 0
    errors: dict[str, int] = {}
    wrong: list[str] = []


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
    soak: Soak | None = None
    problems: list[str] = []
