"""Surroundings that were taken for defects of the program: no home, names that are too long."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

from fedshift.datasets import base
from fedshift.errors import InputError
from fedshift.record.folder import read_run

LONG = Path(tempfile.gettempdir()) / ("n" * 300)


def trap_no_home() -> str:
    """I look for data as a user without a home folder, as in many containers."""
    lost = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"} | {"HOME": "~nobody"}
    with mock.patch.dict(os.environ, lost, clear=True):
        try:
            folders = base.search_folders()
        except InputError as e:
            return f"refused: {e}"
        except Exception as e:
            return f"raw: {type(e).__name__}"
    invented = [str(one) for one in folders if "~" in str(one)]
    return f"silent: looks in {invented}" if invented else "right"


def trap_long_name() -> str:
    """I read a run folder whose name has 300 letters."""
    try:
        read_run(LONG)
    except InputError as e:
        return f"refused: {e}"
    except Exception as e:
        return f"raw: {type(e).__name__}"
    return "silent: a run was read from nowhere"
