"""A filter of system calls for a process of its own: what a container's sandbox does to calls it does not know."""

import ctypes
import os
import platform
import struct
from collections.abc import Mapping

NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "fsync": 74, "link": 86, "statfs": 137, "openat": 257, "linkat": 265, "fallocate": 285, "preadv": 295,
        "memfd_create": 319, "preadv2": 327,
    },
    "aarch64": {
        "linkat": 37, "statfs": 43, "fallocate": 47, "openat": 56, "preadv": 69, "fsync": 82, "memfd_create": 279,
        "preadv2": 286,
    },
}  # fmt: skip
"""Of the calls that can be refused, where there is such a call."""
DIRECT = "openat with O_DIRECT"
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_FLAGS_OF_OPENAT = 16 + 2 * 8


def refuse(calls: Mapping[str, int]) -> None:
    """Have *calls* (names of `NUMBERS`, or `DIRECT`) fail with these errnos in this process, from now on.

    Raises:
        OSError, KeyError: that cannot be done here.
    """
    program = b""
    for name, error in calls.items():
        number = NUMBERS[platform.machine()].get("openat" if name == DIRECT else name)
        if number is None:
            continue
        program += struct.pack("HBBI", _LOAD, 0, 0, 0)
        if name == DIRECT:
            program += struct.pack("HBBI", _EQUAL, 0, 3, number)
            program += struct.pack("HBBI", _LOAD, 0, 0, _FLAGS_OF_OPENAT)
            program += struct.pack("HBBI", _ANY_BIT, 0, 1, os.O_DIRECT)
        else:
            program += struct.pack("HBBI", _EQUAL, 0, 1, number)
        program += struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | error)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    held = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(filters)):
        raise OSError(ctypes.get_errno(), "no filter of system calls can be set here")
