"""Keep freed memory in the process: the next training step allocates the same sizes again."""

from __future__ import annotations

import ctypes
import sys

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, and the largest values that mallopt accepts.
TRIM, MMAP = -1, -3
LARGEST_TRIM, LARGEST_MMAP = 2**31 - 1, 1 << 30


def keep_memory() -> bool:
    """Tell glibc to keep freed blocks in the process instead of returning them to the system.

    Otherwise every training step causes page faults for its activations, and processes that run
    side by side wait for one another in the kernel. Only speed changes. Returns False if this
    system has no glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # Blocks up to LARGEST_MMAP then come from the heap, of which glibc returns memory to the system
    # only if more than LARGEST_TRIM is free.
    return bool(mallopt(MMAP, LARGEST_MMAP) and mallopt(TRIM, LARGEST_TRIM))
