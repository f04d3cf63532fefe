"""Two trees on one machine: the same methods, weights and experiments, bit for bit.

    python benchmarks/net.py BASE [--new TREE] [GROUP ...] [--problems N]

BASE is another checkout (`git worktree add ../base COMMIT`). This tree's `tests/net/play.py` plays
both, each with its own `fedshift` and `tests/support`. GROUP is the beginning of a group's name
("methods", "methods loop", "weights", "specs"); all are played by default. Loop, workers, Flower
and experiments must agree in bits, stacked and dense to 1e-5, weights to 1e-9 in L1. Each group has
a line with how many do, and lines with the names of the others. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

TREE = Path(__file__).resolve().parents[1]
Played = dict[str, dict[str, dict[str, np.ndarray]]]


def start(tree: Path, python: str, groups: list[str], problems: int, out: Path) -> subprocess.Popen:
    """Play a tree in a process of its own."""
    player = [python, str(TREE / "tests/net/play.py"), *groups, "--out", str(out)]
    return subprocess.Popen(
        [*player, "--problems", str(problems)],
        env=os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tests'}", "OMP_NUM_THREADS": "1"},
        cwd=tree,
    )


def read(path: Path) -> Played:
    """Group -> name -> tensor -> numbers."""
    played: Played = defaultdict(lambda: defaultdict(dict))
    with np.load(path) as file:
        for key in file.files:
            group, name, tensor = key.split("|", 2)
            played[group][name][tensor] = file[key]
    return played


def difference(group: str, old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> str:
    """What differs, in a few words; "" where they are equal as far as the group must be."""
    errors = [next((k for k in side if k.startswith("error/")), "") for side in (old, new)]
    if any(errors):
        return (
            "" if errors[0] and errors[1] else f"{errors[0] or 'played'} -> {errors[1] or 'played'}"
        )
    if group == "weights":
        far = float(np.abs(old["weights"] - new["weights"]).sum())
        certified = f"certified {bool(old['certified'])} -> {bool(new['certified'])}"
        wrong = bool(new["certified"]) and far > 1e-6
        return f"{far:.0e}, {certified}{', CERTIFIED AND WRONG' * wrong}" if far > 1e-9 else ""
    if old.keys() != new.keys():
        return f"only in one: {sorted(old.keys() ^ new.keys())[:3]}"
    loose = group.endswith((" stacked", " dense"))
    odd = [k for k in old if not (close if loose else same)(old[k], new[k])]
    return f"{len(odd)} of {len(old)} tensors, as {odd[0]}" if odd else ""


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """To 1e-5 of the largest number."""
    if a.shape != b.shape:
        return False
    size = max(1e-2, float(np.abs(np.nan_to_num(a)).max(initial=0)))
    return bool(np.allclose(a, b, rtol=0, atol=1e-5 * size, equal_nan=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--new", type=Path, default=TREE)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--base-python", default=sys.executable)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        outs = [Path(place) / "base.npz", Path(place) / "new.npz"]
        trees = [(asked.base, asked.base_python), (asked.new, sys.executable)]
        running = [
            start(tree.resolve(), python, asked.groups, asked.problems, out)
            for (tree, python), out in zip(trees, outs, strict=True)
        ]
        if sum(process.wait() for process in running):
            sys.exit("net: a tree could not be played")
        base, new = map(read, outs)
    bad = 0
    for group in [*base, *(g for g in new if g not in base)]:
        names = base[group].keys() | new[group].keys()
        odd = {
            name: difference(group, base[group][name], new[group][name])
            if name in base[group] and name in new[group]
            else f"only in {'base' if name in base[group] else 'new'}"
            for name in sorted(names)
        }
        odd = {name: what for name, what in odd.items() if what}
        refused = sum(any(k.startswith("error/") for k in new[group][n]) for n in new[group])
        print(f"{group}: {len(names) - len(odd)} of {len(names)} equal ({refused} refused)")
        for name, what in odd.items():
            print(f"    {name}: {what}")
        bad += len(odd)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
