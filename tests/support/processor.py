"""The threads of the tests, and processors that announce instructions which they do not run.

Some virtual machines say that they have AMX, and a product in bfloat16 ends the process (SIGILL).
Tests then keep to AVX-512, as docs/running.md tells users to.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys

# One thread for the products of numpy and scipy, in this process and those that it starts: tests
# run side by side, and threads that wait for a core spin. Read when numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

VARIABLE, LESS = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"


def _multiply() -> None:
    faulthandler.disable()
    torch.set_num_threads(1)
    a = torch.ones(32, 1024, dtype=torch.bfloat16)
    a @ a.T


def keep_to_what_works() -> None:
    """Before the first product of this process: torch asks for the variable only once."""
    if VARIABLE in os.environ or not sys.platform.startswith("linux"):
        return
    child = multiprocessing.get_context("fork").Process(target=_multiply)
    child.start()
    child.join()
    if child.exitcode != 0:
        os.environ[VARIABLE] = LESS


keep_to_what_works()
