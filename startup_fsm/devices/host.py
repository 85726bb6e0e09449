"""The memory of this machine, as Linux tells it; None where it does not."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_available_bytes() -> int | None:
    """Bytes that a new process could have without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None
