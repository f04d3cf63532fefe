"""Keep freed memory in the process: the next training step allocates the same sizes again."""

from __future__ import annotations

import ctypes
import sys

from fedshift.kernels.torch_private import plain

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, and the largest values that are taken.
TRIM, MMAP = -1, -3
LARGEST_TRIM, LARGEST_MMAP = 2**31 - 1, 1 << 30


def keep_memory() -> bool:
    """Keep freed blocks in the process instead of returning them to the system, where glibc can.

    Without it every training step pays page faults for its activations, and processes side by side
    wait for one another in the kernel. Nothing but speed changes. True if it was done.
    """
    if plain() or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # Blocks up to MMAP come from the heap, which is trimmed only beyond TRIM.
    return bool(mallopt(MMAP, LARGEST_MMAP) and mallopt(TRIM, LARGEST_TRIM))
