"""Plan of a run: the measurements and their sizes, checked before the first request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from aiockpt.errors import UsageError
from aiockpt.options import IO, MIB

BLOCK_BYTES = IO().slab_bytes
"""Bytes of one write and of one read of a data file: the block of the engine."""

RECEIPT_BYTES = 4 << 10
MANIFEST_BYTES = MIB
SMALL_SIZES = (RECEIPT_BYTES, MANIFEST_BYTES)
"""Small objects: a receipt of one rank, and a manifest of about ten thousand pieces."""

LISTED_COUNT = 100
"""Objects in the folder that is listed: the receipts of a step of a hundred ranks."""

MOST_REQUESTS = 2_000
"""Small requests in one point: requests cost money in some stores, and 99 % of this many is a figure."""

MOST_CONCURRENCY = 256
MOST_FAULTS = 0.3
"""Twelve attempts fail in a row once in two million calls; with more faults, calls fail in spite of the retries."""


class StressPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run. A *point* is one operation at one size and one concurrency.

    Attributes:
        sizes: bytes of the data files.
        concurrency: requests under way at once, one point for each.
        seconds: of one point; a data file that was begun is finished.
        most_bytes: moved in one point, and so the maximum in the place at once.
        soak_s: seconds of the soak after the points; 0: none.
        faults: fraction of the soak's calls that fail on purpose.
        seed: of the bytes, and of the soak's random faults.
    """

    sizes: tuple[int, ...] = (16 * MIB, 256 * MIB)
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    seconds: float = 2.0
    most_bytes: int = 1024 * MIB
    soak_s: float = 0.0
    faults: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        _check_rising("--sizes", self.sizes, 1, None)
        _check_rising("--concurrency", self.concurrency, 1, MOST_CONCURRENCY)
        if not self.seconds > 0:
            raise UsageError(f"--seconds {self.seconds:g}: give more than 0")
        if self.most_bytes < MANIFEST_BYTES:
            raise UsageError(f"--bytes {self.most_bytes}: give at least {MANIFEST_BYTES} (1MiB)")
        if self.sizes and self.sizes[-1] > self.most_bytes:
            raise UsageError(
                f"--sizes names a file of {self.sizes[-1]} bytes, and --bytes allows {self.most_bytes} in one point: raise"
                " one, or lower the other"
            )
        if not self.soak_s >= 0:
            raise UsageError(f"--soak {self.soak_s:g}: give seconds, or leave it out")
        if not 0 <= self.faults <= MOST_FAULTS:
            raise UsageError(f"--faults {self.faults:g}: give a fraction of the calls, from 0 to {MOST_FAULTS:g}")

    @property
    def point_count(self) -> int:
        """Number of points and other parts; each is announced."""
        small_operations = 2 * len(SMALL_SIZES) + 4
        sweeps = 2 * len(self.sizes) + small_operations
        checks = 1
        return sweeps * len(self.concurrency) + checks + (self.soak_s > 0)

    def announce(self) -> str:
        """Return the planned duration in words."""
        whole_s = self.point_count * self.seconds + self.soak_s
        about = f"{whole_s / 60:.0f} min" if whole_s >= 90 else f"{math.ceil(whole_s)} s"
        soak = f" and a soak of {self.soak_s:g} s" if self.soak_s else ""
        return (
            f"{self.point_count} points of {self.seconds:g} s{soak}: some {about}, longer where the place is slow; fewer"
            " --sizes and --concurrency and less --seconds make it shorter"
        )


def _check_rising(name: str, values: Sequence[int], least: int, most: int | None) -> None:
    """Check that *values* are different, in rising order, and within bounds."""
    if not values:
        raise UsageError(f"{name}: give at least one")
    if list(values) != sorted(set(values)):
        raise UsageError(f"{name} {','.join(map(str, values))}: give different values, the lowest first")
    if values[0] < least or (most is not None and values[-1] > most):
        bounds = f"at least {least}" + (f" and at most {most}" if most is not None else "")
        raise UsageError(f"{name} {','.join(map(str, values))}: give {bounds}")
