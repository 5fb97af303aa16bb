"""System calls that a file system, a sandbox or a kernel may lack: the errors that mean it, and what is done instead.

Guarantees:

- An error means "not here" where the table below says so, and nowhere else. The errors of one call that mean "not here" also
  mean "not allowed" (a seccomp filter raises EPERM, a user-space file system EACCES): what is done instead needs the same
  rights, so that a right which is missing shows there.
- What a place lacks is remembered for that place, and logged once.
- A place whose folders cannot be flushed is reported by a warning. The call is made again each time, because a root may
  lie on several file systems and the durability of a commit is worth a call.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Literal, NamedTuple

logger = logging.getLogger("aiockpt")

OptionalCall = Literal["fallocate", "O_DIRECT", "preadv2", "link", "statfs", "fsync of a folder"]
_UNKNOWN = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_REFUSED = _UNKNOWN | {errno.EPERM, errno.EACCES}


class Fallback(NamedTuple):
    """The errors of a call that mean that it is not here, and what follows."""

    absent: frozenset[int]
    instead: str
    level: int = logging.INFO


FALLBACKS: Mapping[OptionalCall, Fallback] = {
    "fallocate": Fallback(
        _REFUSED | {errno.EINVAL, errno.ENODEV}, "no space is reserved, and a full disk shows while data are written"
    ),
    "O_DIRECT": Fallback(_REFUSED | {errno.EINVAL}, "data pass the page cache"),
    "preadv2": Fallback(_REFUSED | {errno.EINVAL}, "reads go through the page cache without asking what it holds"),
    "link": Fallback(
        _REFUSED | {errno.EXDEV, errno.EMLINK},
        "records are created in place; a crash can leave a torn one, which readers refuse",
    ),
    "statfs": Fallback(_REFUSED, "how much is free is not known"),
    "fsync of a folder": Fallback(
        _UNKNOWN | {errno.EINVAL, errno.EBADF},
        "steps that are committed here outlive the job and its processes, and a power cut or a crash of the system only"
        " where the file system writes names down by itself (SaveResult.durable is False)",
        logging.WARNING,
    ),
}


class OptionalCalls:
    """The optional calls of one place. Any thread.

    Args:
        place: its name in the log.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._missing: set[OptionalCall] = set()

    def lacks(self, call: OptionalCall, error: OSError) -> bool:
        """Return whether *error*, of *call*, means that the place has no such call; remember it then."""
        fallback = FALLBACKS[call]
        if error.errno not in fallback.absent:
            return False
        if call not in self._missing:
            self._missing.add(call)
            logger.log(fallback.level, "%s: no %s here (%s); %s", self._place, call, error.strerror, fallback.instead)
        return True

    def has(self, call: OptionalCall) -> bool:
        """Return False once the place was found to lack *call*."""
        return call not in self._missing
