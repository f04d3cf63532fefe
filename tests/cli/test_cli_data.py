"""Damaged data sets through the command line: exit code 3, the file named, nothing written."""

from __future__ import annotations

import gzip
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedshift.cli.app import main
from support.dataset_fixtures import FILES, idx, mnist


def cifar(folder: Path, broken: bytes) -> None:
    place = folder / "cifar-10-batches-py"
    place.mkdir()
    rows = {b"labels": [0], b"data": b"", b"filenames": [b"a"], b"batch_label": b""}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (place / name).write_bytes(pickle.dumps(rows, protocol=2))
    (place / "data_batch_1").write_bytes(broken)


class Evil:
    """Creates a file when the standard library unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("touched"),))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("mnist", lambda f: mnist(f, FILES[0], idx(4, 28, 28)[:-9]), [FILES[0]]),
        ("mnist", lambda f: mnist(f, FILES[1], b"\x00\x00\x0d\x01" + bytes(8)), [FILES[1]]),
        ("mnist", lambda f: mnist(f, FILES[3], gzip.compress(idx(4))[:-6]), [FILES[3]]),
        ("cifar-10", lambda f: cifar(f, pickle.dumps(Evil())), ["data_batch_1", "Path"]),
        ("cifar-10", lambda f: cifar(f, b"\x80\x02}"), ["data_batch_1"]),
    ],
    ids=["truncated idx", "wrong magic", "truncated gzip", "malicious pickle", "truncated pickle"],
)
def test_damaged_files_are_named(
    name: str,
    make: Callable[[Path], None],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, work = tmp_path / "data", tmp_path / "work"
    data.mkdir()
    work.mkdir()
    make(data)
    monkeypatch.chdir(work)
    monkeypatch.setenv("FEDSHIFT_DATA", str(data))
    (work / "f.toml").write_text(f'[data]\nname = "{name}"\n')
    monkeypatch.setattr(sys, "argv", ["fedshift", "run", "f.toml"])
    with pytest.raises(SystemExit) as left:
        main()
    errors = capsys.readouterr().err
    assert left.value.code == 3
    assert all(word in errors for word in words), errors
    assert [p.name for p in work.iterdir()] == ["f.toml"]
