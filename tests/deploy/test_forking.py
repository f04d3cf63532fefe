"""The process that waits for a client's tasks: what it imports, and what it copies itself for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResultStatus

from fedshift_deploy.chosen import APP
from fedshift_deploy.forking import CAN_FORK
from fedshift_deploy.inside import Launcher
from fedshift_deploy.notices import NOTICES
from support.loopback import gone

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="copied on Linux, without FEDSHIFT_PLAIN")
WAITS = r"""
import os, signal, sys
from fedshift_deploy.forking import fork_for_each
line = fork_for_each(sys.stdin).strip()
row = line, os.getpid(), os.getppid(), repr(sys.stdin.read())
# In one piece, since others write as well.
os.write(1, (" ".join(map(str, row)) + "\n").encode())
if line.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, line))
"""


def test_each_line_has_a_process_of_its_own(tmp_path: Path) -> None:
    """It reads no other line, and a kill of one of them is reported; a normal end is not."""
    notices, lines = tmp_path / "notices", ("first", "SIGKILL", "SIGTERM", "last")
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, NOTICES: str(notices)},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        # At once: those that are read ahead are not for the first process.
        process.stdin.write("".join(f"{line}\n" for line in lines))
        process.stdin.flush()
        rows = [process.stdout.readline().split() for _ in lines]
        assert {row[0] for row in rows} == set(lines)
        assert len({row[1] for row in rows}) == 4
        assert {row[2] for row in rows} == {str(process.pid)}
        assert {row[3] for row in rows} == {"''"}
        end = time.monotonic() + 60
        while not notices.exists() and time.monotonic() < end:
            time.sleep(0.05)
        process.stdin.close()
        assert process.wait(60) == 0
    (notice,) = notices.read_text().splitlines()
    text = json.loads(notice)["trouble"]
    why = "the process of its app was ended by signal 9, perhaps for lack of memory"
    assert text == f"this client gave the server no answer: {why}"


def answers(folder: Path, setup: str, task: str, **env: str) -> list[str]:
    """What two copies print, after a set-up in the process that waits."""
    code = (
        "import sys\nfrom fedshift_deploy.forking import fork_for_each, import_what_tasks_need\n"
        f"{setup}\nimport_what_tasks_need(lambda: None)\nfork_for_each(sys.stdin)\n{task}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=folder, env={**os.environ, **env},
    ) as process:  # fmt: skip
        return process.communicate("a\nb\n", timeout=120)[0].splitlines()


@pytest.mark.slow
def test_copies_draw_other_numbers(tmp_path: Path) -> None:
    """As processes that are started do; the control: a seed of the task's own."""
    row = "numpy.random.rand(), torch.rand(1, dtype=torch.float64).item(), random.random()"
    draw = f"row = {row}; os.write(1, ('%r %r %r\\n' % row).encode())"
    setup = "import numpy, os, random, torch"
    one, two = (line.split() for line in answers(tmp_path, setup, draw))
    assert not {*one} & {*two}
    seeded = f"numpy.random.seed(0); torch.manual_seed(0); random.seed(0); {draw}"
    same = answers(tmp_path, setup, seeded)
    assert len(same) == 2
    assert len({*same}) == 1


@pytest.mark.slow
def test_what_an_app_leaves_open_is_written(tmp_path: Path) -> None:
    task = "import os; file = open(str(os.getpid()), 'w'); file.write('row'); os.write(1, b'3\\n')"
    assert answers(tmp_path, "", task, **{APP: "mine:client_app"}) == ["3", "3"]
    # A copy may end after the process that waits.
    end = time.monotonic() + 60
    texts = [""]
    while texts != ["row", "row"] and time.monotonic() < end:
        texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts == ["row", "row"]


@pytest.mark.slow
def test_a_broken_installation_is_reported_by_the_task(tmp_path: Path) -> None:
    """The process that waits does not end by what torch raises when it is imported."""
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open')\n")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    # In one piece, since the other writes as well.
    task = "import os; os.write(1, b'a task\\n')"
    assert answers(tmp_path, "", task, PYTHONPATH=paths) == ["a task", "a task"]


def spec(kind: str, address: str, token: str) -> ExecutionSpec:
    return ExecutionSpec(kind, address, token, True, None, False, 1, True, 7)


def test_tasks_of_a_client_share_the_process_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another address, or a killed process, means a new one; a server's tasks share none."""
    stands_in, rows = tmp_path / "python", tmp_path / "rows"
    stands_in.write_text(f'#!/bin/sh\nwhile read token; do echo "$token $$" >> {rows}; done\n')
    stands_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stands_in))
    launcher, pids = Launcher(), dict[str, int]()

    def launch(kind: str, address: str, token: str) -> int:
        assert launcher.launch(spec(kind, address, token)).status == LaunchResultStatus.ACCEPTED
        end = time.monotonic() + 60
        while token not in pids and time.monotonic() < end:
            text = rows.read_text() if rows.exists() else ""
            pids.update({row.split()[0]: int(row.split()[1]) for row in text.splitlines()})
        return pids[token]

    first = launch(TaskType.CLIENT_APP, "127.0.0.1:9", "a")
    assert launch(TaskType.CLIENT_APP, "127.0.0.1:9", "b") == first
    servers = {launch(TaskType.SERVER_APP, "127.0.0.1:9", token) for token in ("c", "d")}
    assert len(servers | {first}) == 3
    os.kill(first, signal.SIGKILL)
    assert gone(f"{stands_in} -P -m fedshift_deploy.inside flwr-clientapp")
    second = launch(TaskType.CLIENT_APP, "127.0.0.1:9", "e")
    assert second != first
    assert launch(TaskType.CLIENT_APP, "127.0.0.1:9", "f") == second
    other = launch(TaskType.CLIENT_APP, "127.0.0.1:10", "g")
    assert other not in {second, first}
    os.kill(other, signal.SIGKILL)


@pytest.mark.slow
def test_it_goes_by_the_switch() -> None:
    code = "from fedshift_deploy.forking import CAN_FORK; print(CAN_FORK)"
    for value, answer in (("1", "False"), ("0", "True")):
        env = {**os.environ, "FEDSHIFT_PLAIN": value}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.strip() == answer


@pytest.mark.slow
def test_what_is_imported_may_be_copied(tmp_path: Path) -> None:
    """The library's app and torch, no thread, and not the app that the client's file names."""
    (tmp_path / "mine.py").write_text("print('imported')\nclient_app = None\n")
    code = (
        "import sys, threading\n"
        "from fedshift_deploy.forking import import_what_tasks_need\n"
        "from fedshift_deploy.chosen import APP, chosen, imported\n"
        "from fedshift_deploy.inside import CLIENTAPP, command_of\n"
        "import_what_tasks_need(lambda: command_of(CLIENTAPP))\n"
        "names = 'fedshift_deploy.machines.deployed', 'flwr.supernode.runtime.run_clientapp'\n"
        "print({*names} <= {*sys.modules}, sys.modules['torch'].cuda.is_initialized())\n"
        "print(threading.active_count())\n"
        "imported(chosen(APP))\n"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, APP: "mine:client_app", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False", "1", "imported"]
