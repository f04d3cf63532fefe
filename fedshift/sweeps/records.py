"""Run records: the small files of many runs in one compressed file, with a JSON line per run."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedshift.errors import DataError
from fedshift.files import is_file, write

RECORDS = "runs.jsonl.gz"


@dataclass(frozen=True)
class Record:
    """The texts of a run's files by name; path: the record file they were read from."""

    path: Path
    files: Mapping[str, str]


def read_records(path: Path) -> dict[str, Record]:
    """The runs of a record file by name; {} if the file is missing. Raises DataError for damage."""
    if not is_file(path):
        return {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        return {line["run"]: Record(path, _texts(line["files"])) for line in lines}
    except (OSError, EOFError, zlib.error, RecursionError) as e:
        raise _damaged(path, str(e)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _damaged(path, f"a line is no record of a run ({e})") from None


def recorded_in(folder: Path) -> dict[str, Record]:
    """The recorded runs of all tables in a folder."""
    paths = sorted(folder.glob(f"*/{RECORDS}"))
    return {name: record for path in paths for name, record in read_records(path).items()}


def write_records(path: Path, records: Mapping[str, Mapping[str, str]]) -> None:
    """Write runs (name -> file name -> text), sorted, so that equal runs give equal bytes."""
    lines = [{"run": run, "files": _values(records[run])} for run in sorted(records)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    write(path, gzip.compress(text.encode(), mtime=0))  # no time stamp, for the same reason


def _values(files: Mapping[str, str]) -> dict[str, object]:
    """JSON files as objects, so that a record can be searched; the others as text."""
    return {n: json.loads(t) if n.endswith(".json") else t for n, t in files.items()}


def _texts(files: Mapping[str, object]) -> dict[str, str]:
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in files.items()}


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path}: {why}. Restore it, or delete it to train its runs again.")
