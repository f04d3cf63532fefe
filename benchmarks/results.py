"""What every benchmark is run with and leaves: its options, and one JSON file of its figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PLACES = ("--out", "--venvs")
PACKAGES = ("fedshift", "torch", "numpy", "scipy", "safetensors")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """--quick and --out, as all benchmarks have them."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller, to try it out")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
    }


def save(path: Path | None, figures: Any, *, quick: bool) -> None:
    """Write the figures with the machine and the command that gave them."""
    if path is None:
        return
    command = shlex.join(["python", *_shortened(sys.argv)])
    whole = {"command": command, "quick": quick, "machine": machine(), "figures": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def _shortened(argv: Sequence[str]) -> list[str]:
    """The command without the places where it keeps things."""
    shown, skip = [os.path.relpath(argv[0], Path(__file__).parents[1]), *argv[1:]], False
    words = []
    for word in shown:
        if skip or word.startswith(tuple(f"{place}=" for place in PLACES)):
            skip = False
        elif word in PLACES:
            skip = True
        else:
            words.append(word)
    return words


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()
