"""In any surroundings a command ends with a documented exit code, never with that of a defect.

No home, closed folders, names that are too long, full disks, streams that are closed: see
`surroundings.py`, which has the settings, the places and the commands.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.datasets.base import cache_folder, search_folders
from fedshift.errors import InputError
from support.broken_inputs import COUNTS, GOOD, TARGET
from support.report_fixtures import write_run
from support.small_runs import config_of, record_until
from support.surroundings import COMMANDS, GIVEN, LONG, PLACES, SETTINGS

if sys.platform != "linux":
    pytest.skip("closed folders and forks as on Linux", allow_module_level=True)

pytestmark = pytest.mark.slow
DOCUMENTED = {0, 2, 3, 5}
# A tenth of them, in which every setting, place and command has its turn.
CELLS = [
    (setting, command)
    for settings, commands in ((SETTINGS, COMMANDS), (PLACES, GIVEN))
    for i, setting in enumerate(settings)
    for j, command in enumerate(commands)
    if setting != "with a defect" and (i + j) % 10 == 0
]
TINY = GOOD + 'steps = 1\n[model]\nname = "linear"\n'
Perform = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def performed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perform]:
    """Run a cell in a process forked from one with all libraries loaded."""
    given = tmp_path_factory.mktemp("given")
    (given / "f.toml").write_text(TINY)
    (given / "counts.csv").write_text(COUNTS)
    (given / "target.csv").write_text(TARGET)
    (given / "claims.csv").write_text("client," + ",".join(map(str, range(10))) + "\n0" + ",5" * 10)
    write_run(given / "whole")
    record_until(given / "begun", config_of("fedavg", training={"rounds": 2, "steps": 1}), 2)
    env = {k: v for k, v in os.environ.items() if k not in ("FEDSHIFT_DATA", "COLUMNS")}
    script = Path(__file__).parents[1] / "support" / "surroundings.py"
    with (
        tempfile.TemporaryDirectory(prefix="surroundings-") as folder,
        subprocess.Popen(
            [sys.executable, script, folder, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=env | {"OMP_NUM_THREADS": "1"},
        ) as helper,
    ):  # fmt: skip
        assert helper.stdin is not None
        assert helper.stdout is not None

        def perform(setting: str, command: str) -> dict[str, Any]:
            print(json.dumps([setting, command]), file=helper.stdin, flush=True)
            answer: dict[str, Any] = json.loads(helper.stdout.readline())
            return answer

        yield perform
        helper.stdin.close()


def faults(performed: Perform, cells: list[tuple[str, str]]) -> list[str]:
    """The cells with an undocumented end, or with incomplete files."""
    odd = []
    for setting, command in cells:
        done = performed(setting, command)
        if done["code"] not in DOCUMENTED or "Traceback" in done["err"] or done["parts"]:
            odd.append(f"{setting} / {command}: {done['code']} {done['parts']} {done['err']}")
    return odd


def test_odd_surroundings_end_as_documented(performed: Perform) -> None:
    every = (SETTINGS.keys() | PLACES.keys()) - {"with a defect"}
    assert {setting for setting, _ in CELLS} == every
    assert {command for _, command in CELLS} == COMMANDS.keys() | GIVEN.keys()
    assert len(CELLS) > 150
    assert faults(performed, CELLS) == []


def test_the_check_of_surroundings_can_fail(performed: Perform) -> None:
    done = performed("with a defect", "datasets")
    assert done["code"] == 70
    assert re.search(
        r"error: internal error \(OSError: .* report it with \S*fedshift-\S+.log", done["err"]
    )
    assert len(faults(performed, [("with a defect", "datasets"), ("as usual", "datasets")])) == 1


DENIED, TOO_LONG = "Permission denied\n", "File name too long\n"
LOST = r"warning: \$FEDSHIFT_DATA: "
SAID = [
    ("HOME: unset", "run", 0, ""),
    ("HOME: unset", "datasets", 0, ""),
    ("HOME: unset", "fetch a file", 2, "no folder for downloads: ~/.cache stands below a home"),
    ("FEDSHIFT_DATA: under a closed folder", "run", 0, f"{LOST}Permission denied: closed/x\n"),
    ("FEDSHIFT_DATA: a closed folder", "datasets", 0, f"{LOST}Permission denied: closed\n"),
    ("FEDSHIFT_DATA: nobody's home", "run", 0, f"{LOST}no such folder: ~nobody-of-that-name/x\n"),
    ("FEDSHIFT_DATA: a long name", "datasets", 0, f"{LOST}File name too long: {LONG}\n"),
    ("TMPDIR: a closed folder", "run", 0, ""),
    ("no file may grow", "run", 2, r"error: \S+: cannot be written: File too large\n"),
    ("working in a folder that is gone", "run", 2, "current folder: No such file or directory; go"),
    ("under a closed folder", "run FILE", 2, f"error: closed/x: cannot be read: {DENIED}"),
    ("under a closed folder", "run --out", 2, f"error: closed/x: cannot be looked into: {DENIED}"),
    (
        "under a closed folder",
        "run --resume",
        3,
        f"closed/x/deployment.json: cannot be read: {DENIED}",
    ),
    ("under a closed folder", "report FOLDER", 3, f"x: cannot be read: {DENIED}"),
    ("under a closed folder", "diagnose --report", 2, f"x.html: cannot be replaced: {DENIED}"),
    ("under a closed folder", "audit FOLDER", 3, f"error: closed/x: cannot be read: {DENIED}"),
    ("under a closed folder", "client FOLDER", 2, f"x/client.json: cannot be read: {DENIED}"),
    ("a long name", "run --out", 2, f"error: {LONG}: cannot be looked into: {TOO_LONG}"),
]


@pytest.mark.parametrize(("setting", "command", "code", "message"), SAID)
def test_commands_in_odd_surroundings(
    setting: str, command: str, code: int, message: str, performed: Perform
) -> None:
    done = performed(setting, command)
    assert done["code"] == code, done["err"]
    assert re.search(message, done["err"]), done["err"]


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~nobody-of-that-name")
    assert search_folders() == (Path("/usr/share/datasets"),)
    with pytest.raises(InputError, match=r"name a folder, or set \$XDG_CACHE_HOME"):
        cache_folder()
    monkeypatch.setenv("HOME", str(tmp_path))  # the control
    assert search_folders()[0] == cache_folder() == tmp_path / ".cache" / "fedshift"


REAL: dict[str, tuple[list[str], list[str], dict[str, str], int, str]] = {
    "methods without docstrings": (["-OO"], ["methods"], {}, 0, "fedavg"),
    "a run without docstrings": (["-OO"], ["run", "f.toml", "--out", "o"], {}, 0, "FedAvg"),
    "no home for matplotlib": (
        [], ["report", "whole", "--figures", "f"], {"HOME": "loop", "XDG_CONFIG_HOME": "loop/x"}, 2,
        r"matplotlib, which cannot begin: .*\$MPLCONFIGDIR",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_what_only_a_new_process_shows(name: str, tmp_path: Path) -> None:
    options, arguments, more, code, message = REAL[name]
    (tmp_path / "f.toml").write_text(TINY)
    (tmp_path / "loop").symlink_to("loop")
    write_run(tmp_path / "whole")
    done = subprocess.run(
        [sys.executable, *options, "-m", "fedshift", *arguments], cwd=tmp_path, check=False,
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stdout + done.stderr)
