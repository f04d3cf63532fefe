"""Files that appear whole or not at all, and values that JSON can hold."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from fedshift.errors import InputError


def write(path: Path, content: bytes | str) -> None:
    """Write a file in one step: a temporary file beside it, flushed, then renamed over it.

    Makes the folder where it is missing. Raises InputError, naming the path, where it cannot.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    except BaseException as e:
        # On a read-only file system removing fails as writing did.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise InputError(f"{path}: cannot be written: {e.strerror}") from None
        raise


def make_folder(path: Path) -> None:
    """Make a folder for results. Raises InputError where it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise InputError(f"{path}: is not a folder; give another place") from None
    except OSError as e:
        raise InputError(
            f"{path}: cannot be written to: {e.strerror}; give another place"
        ) from None


def check_page(path: Path) -> None:
    """Refuse, with InputError, a place for an HTML page that holds something else."""
    if path.suffix.lower() != ".html":
        raise InputError(f"{path}: the report is an HTML page; give it a name that ends in .html")
    try:
        with path.open("rb") as f:
            start = f.read(200)
    except FileNotFoundError:
        return
    except OSError as e:
        raise InputError(f"{path}: cannot be replaced: {e.strerror}") from None
    if not start.lstrip().lower().startswith(b"<!doctype html"):
        raise InputError(f"{path}: exists and is not an HTML page; give another name")


def clean(value: Any) -> Any:
    """A value that JSON can hold: NaN becomes null, infinity the text "inf"."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    # Arrays, tensors and numpy's numbers, without importing either.
    return clean(value.tolist()) if hasattr(value, "tolist") else value
