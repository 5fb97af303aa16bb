"""How much memory does this machine have to spare?"""

from __future__ import annotations

import os


def available_bytes() -> int:
    """Return the bytes that can be used without swapping; what is free where the kernel does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
