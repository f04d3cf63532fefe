"""Damaged files of every kind: `python benchmarks/decoders.py [--seconds 600] [--write]`.

Whole files are damaged at random (`tests/support/damage.py`) and read again: configurations,
counts, checkpoints, run folders, models, data sets, arrays of Flower's messages. A reader must take
the file or refuse it in one message that names it: no other error, no more memory than the limit,
no hang.

`--write` writes results/decoders.md. `--seed` starts another sequence.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import gzip
import io
import json
import pickle
import platform
import struct
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch

from fedshift.csv_counts import read_counts, read_target
from fedshift.datasets import cifar, idx, images, store, writers
from fedshift.datasets.pickled_tables import load_object
from fedshift.engine.storage.checkpoint import read_checkpoint
from fedshift.errors import DataError
from fedshift.experiments.config.load import dumps, load_config, validate
from fedshift.experiments.experiment import record, run_experiment
from fedshift.experiments.folder.model_file import read_parts
from fedshift.experiments.folder.routers import load_router
from fedshift.experiments.folder.run_folder import kept_in
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.task.preparing import prepare
from fedshift.files import read_object
from fedshift.record.folder import read_run
from fedshift_papers.datasets import heart, iwildcam, sheet
from support.damage import Reader, fuzz_file

OUT = Path(__file__).parents[1] / "results" / "decoders.md"
MEMORY, BATCH = 6 << 30, 50
CLASSES = ("cat", "dog", "owl")


def config(method: str) -> Any:
    """Two rounds of four small clients."""
    tables = {
        "data": {"name": "fashion-mnist-mini", "validation": 0.2, "limit": 200},
        "shift": {"kind": "dirichlet-per-client", "beta": 1.0, "clients": 4, "target": "clients"},
        "model": {"name": "mlp-projected", "hidden": [4]},
        "method": {"name": method},
        "training": {"rounds": 2, "steps": 1, "evaluate_every": 1},
    }
    return validate(tables)


def of_runs(folder: Path) -> Iterator[Reader]:
    """Everything in a run folder, and what a run reads before it begins."""
    run, cut, made = folder / "run", folder / "cut", config("feddrm")
    prepared = prepare(made)
    for place in (run, cut):
        place.mkdir()
    record(run, made, prepared, ignore_event)
    run_experiment(made, prepared=prepared, keeper=kept_in(cut, made, prepared, 2))
    checkpoint = next(cut.rglob("state.safetensors")).parent
    toml = folder / "experiment.toml"
    toml.write_text(dumps(made))
    yield Reader("configuration", toml, lambda: load_config(toml))
    for name in ("summary.json", "metrics.csv", "served.csv", "clients.csv", "lock.json"):
        yield Reader(f"run folder, {name}", run / name, lambda: read_run(run))
    yield Reader("lock.json to resume", run / "lock.json", lambda: read_object(run / "lock.json"))
    model = run / "model.safetensors"
    yield Reader("model.safetensors", model, lambda: read_parts(model))
    for path in (model, run / "clients.csv", run / "summary.json"):
        yield Reader(f"router, {path.name}", path, lambda: load_router(run, shape=(1, 28, 28)))
    for path in (checkpoint / "round.json", checkpoint / "state.safetensors"):
        yield Reader(f"checkpoint, {path.name}", path, lambda: read_checkpoint(checkpoint.parent))


def of_tables(folder: Path) -> Iterator[Reader]:
    """What `fedshift diagnose` reads."""
    counts, row, column = (folder / f"{n}.csv" for n in ("counts", "row", "column"))
    counts.write_text("client,cat,dog,owl\na,10,20,0\nb,0,5,5\n")
    row.write_text("cat,dog,owl\n0.2,0.6,0.2\n")
    column.write_text("label,share\ncat,0.2\ndog,0.6\nowl,0.2\n")
    yield Reader("counts", counts, lambda: read_counts(counts))
    yield Reader("target, a row", row, lambda: read_target(row, CLASSES))
    yield Reader("target, a column", column, lambda: read_target(column, CLASSES))


def of_sets(folder: Path) -> Iterator[Reader]:
    """Data sets in their official layouts."""
    source = np.random.default_rng(0)
    pixels = source.integers(0, 256, (6, 28, 28)).astype(np.uint8).tobytes()
    raw, packed = folder / "images-idx3", folder / "images-idx3.gz"
    raw.write_bytes(struct.pack(">IIII", 0x0803, 6, 28, 28) + pixels)
    packed.write_bytes(gzip.compress(raw.read_bytes()))
    yield Reader("idx", raw, lambda: idx.read_array(raw, 3))
    yield Reader("idx, gzipped", packed, lambda: idx.read_array(packed, 3))
    batch = folder / "data_batch_1"
    data = source.integers(0, 256, (5, 3072)).astype(np.uint8)
    batch.write_bytes(pickle.dumps({b"labels": [0, 1, 2, 3, 4], b"data": data}, protocol=2))
    yield Reader("CIFAR batch", batch, lambda: cifar.read_batch(batch))
    signals = folder / "signals.npy"
    np.save(signals, np.array({"x": [source.random((2, 3))], "y": ["a"]}, dtype=object))
    yield Reader("NumPy object", signals, lambda: load_object(signals))
    leaf = folder / "femnist"
    x = source.random((2, 784)).round(2).tolist()
    for part in ("train", "test"):
        (leaf / part).mkdir(parents=True)
        content = {"users": ["f0"], "num_samples": [2], "user_data": {"f0": {"x": x, "y": [3, 7]}}}
        (leaf / part / "all_data_0.json").write_text(json.dumps(content))
    yield Reader("LEAF", leaf / "train" / "all_data_0.json", lambda: writers.leaf(leaf))
    patients = folder / "heart"
    patients.mkdir()
    for name in heart.FILES:
        (patients / name).write_text("63,1,1,145,233,1,2,150,0,2.3,3,0,6,0\n" * 3)
    yield Reader("heart disease", patients / heart.FILES[0], lambda: heart.scan(patients))


def of_pictures(folder: Path) -> Iterator[Reader]:
    """Photographs, tables about them, archives and spreadsheets."""
    from PIL import Image

    place, out = folder / "iwildcam", io.BytesIO()
    (place / "train").mkdir(parents=True)
    Image.fromarray(np.arange(12 * 8 * 3, dtype=np.uint8).reshape(12, 8, 3)).save(out, "PNG")
    names = "split,location_remapped,sequence_remapped,y,filename"
    rows = [f"{split},{i},{i},{i},{i}.png" for i, split in enumerate(("train", "val", "test"))]
    (place / "metadata.csv").write_text("\n".join([names, *rows]) + "\n")
    (place / "categories.csv").write_text("y,name\n0,cat\n1,dog\n2,owl\n")
    for i in range(3):
        (place / "train" / f"{i}.png").write_bytes(out.getvalue())
    for name in ("metadata.csv", "categories.csv"):
        yield Reader(f"iWildCam, {name}", place / name, lambda: iwildcam.scan(place))

    def decoded() -> object:
        return images.decode(iwildcam.scan(place).images, np.arange(3), 8)

    yield Reader("photograph", place / "train" / "1.png", decoded)
    tar, xlsx = folder / "tree.tar", folder / "labels.xlsx"
    with tarfile.open(tar, "w") as archive:
        archive.add(place, arcname="tree")

    def unpacked() -> object:
        archive = store.archive(tar)
        return [archive.read(name) for name in archive.names()]

    yield Reader("tar archive", tar, unpacked)
    with zipfile.ZipFile(xlsx, "w") as book:
        cells = '<c r="A1" t="inlineStr"><is><t>name</t></is></c>', '<c r="A2"><v>7</v></c>'
        text = "".join(f'<row r="{i}">{cell}</row>' for i, cell in enumerate(cells, 1))
        book.writestr("xl/worksheets/sheet1.xml", f"<worksheet>{text}</worksheet>")
    yield Reader("spreadsheet", xlsx, lambda: sheet.read_sheet(xlsx.read_bytes(), xlsx, ["name"]))


def of_messages(folder: Path) -> Iterator[Reader]:
    """An array as Flower sends it: bytes that NumPy wrote."""
    from flwr.app import Array, ArrayRecord

    from fedshift.flower.arriving import read_arrays

    path, out = folder / "array.npy", io.BytesIO()
    np.save(out, np.arange(12, dtype=np.float32).reshape(3, 4))
    path.write_bytes(out.getvalue())

    def read() -> object:
        array = Array(dtype="float32", shape=(3, 4), stype="numpy.ndarray", data=path.read_bytes())
        records = {"delta": ArrayRecord({"w": array})}
        try:
            return read_arrays(records, 1 << 20)
        except DataError:
            raise
        except ValueError as e:  # the round's log names the client; here it is the file
            raise DataError(f"{path.name}: {e}") from None

    yield Reader("array of a message", path, read)


@dataclass
class Sum:
    """What came of one reader so far."""

    taken: int = 0
    refused: int = 0
    broken: list[str] = field(default_factory=list)


def fuzzed(readers: Sequence[Reader], seconds: float, seed: int) -> dict[str, Sum]:
    """All readers in turn, until the time is over, each once at least."""
    sums = {reader.name: Sum() for reader in readers}
    began, turn = time.monotonic(), 0
    while not turn or time.monotonic() - began < seconds:
        for reader in readers:
            if turn and time.monotonic() - began >= seconds:
                break
            counts, mine = fuzz_file(reader, BATCH, seed + turn), sums[reader.name]
            mine.taken, mine.refused = mine.taken + counts.taken, mine.refused + counts.refused
            mine.broken += counts.broken
        turn += 1
    return sums


def limit_memory() -> None:
    """A file that asks for terabytes must not get them."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def main() -> int:
    """The table; exit code 1 if anything was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit_memory()
    with tempfile.TemporaryDirectory() as scratch:
        makers = (of_runs, of_tables, of_sets, of_pictures, of_messages)
        readers = [reader for make in makers for reader in make(Path(scratch))]
        sums = fuzzed(readers, options.seconds, options.seed)
    lines = ["| file | taken | refused | broken |", "| --- | --- | --- | --- |"]
    lines += [f"| {k} | {s.taken} | {s.refused} | {len(s.broken)} |" for k, s in sums.items()]
    broken = [one for s in sums.values() for one in s.broken]
    text = PAGE.format(
        table="\n".join(lines), files=sum(s.taken + s.refused for s in sums.values()),
        seconds=options.seconds, seed=options.seed, memory=MEMORY >> 30,
        broken="; ".join(broken[:10]) or "nothing", torch=torch.__version__,
        machine=platform.machine(),
    )  # fmt: skip
    print(text)
    if options.write:
        OUT.write_text(text)
    return int(bool(broken))


PAGE = """# Damaged files

{files} files, each whole before it was damaged at random (cut, bits flipped, other magic, lengths
that promise terabytes, odd numbers and words, brackets within brackets) and read again, within
{memory} GB; made by `python benchmarks/decoders.py --seconds {seconds:g} --seed {seed} --write`
(torch {torch}, {machine}). Taken: read as if it were whole, as a file may be in which another
number stands. Refused: by one clear message that names the file. Broken, {broken}: anything else.

{table}
"""

if __name__ == "__main__":
    sys.exit(main())
