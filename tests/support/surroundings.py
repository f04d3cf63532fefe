"""Commands in odd surroundings, each in a process forked from one with the libraries loaded.

As a script, `surroundings.py FOLDER GIVEN`: performs the cells that come on stdin, one a line as
[setting, command] by name, each in a copy of GIVEN below FOLDER, and answers with a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import pkgutil
import pwd
import resource
import shutil
import signal
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

LONG = "n" * 300
SECONDS = 120

Setting = Callable[[], None]
Command = tuple[str, ...]


def variables(**given: str | None) -> Setting:
    """Set variables of the environment; None removes one."""

    def apply() -> None:
        for name, value in given.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return apply


def closed(*descriptors: int) -> Setting:
    """Streams that were closed before the command began, as by `>&-`."""

    def apply() -> None:
        for one in descriptors:
            name = ("stdin", "stdout", "stderr")[one]
            os.close(one)
            setattr(sys, name, None)

    return apply


def limited(what: int, most: int) -> Setting:
    return lambda: resource.setrlimit(what, (most, most))


def onto(path: str) -> Setting:
    """stdout goes to a device or a pipe."""

    def apply() -> None:
        os.dup2(os.open(path, os.O_WRONLY), 1)

    return apply


def unread() -> None:
    """stdout is a pipe without a reader, as after `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def in_a_folder_that_is_gone() -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def in_a_closed_folder() -> None:
    os.mkdir("shut")
    os.chdir("shut")
    os.chmod(".", 0)


def with_a_defect() -> None:
    """The control: a defect of the program that the surroundings do not explain."""
    from fedshift.cli import listings

    def broken(**_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor", "x")

    listings.datasets_listed = broken


# What a path can be. The folder of a cell holds these.
PLACES = {
    "under a closed folder": "closed/x",
    "a closed folder": "closed",
    "in a folder that may only be read": "readonly/x",
    "under a file": "notes/x",
    "a file": "notes",
    "in no folder": "nowhere/x",
    "a long name": LONG,
    "under a long name": f"{LONG}/x",
    "a long path": "p/" * 3000 + "x",
    "nobody's home": "~nobody-of-that-name/x",
    "a home": "~/x",
    "the null device": "/dev/null",
    "under the null device": "/dev/null/x",
    "a link to itself": "loop",
    "under a link to itself": "loop/x",
    "a link to nothing": "dangling",
    "nothing": "",
    "a folder in use": "used",
    "a name that is no text": "\udcff\udcfe",
}  # fmt: skip
PATHS = ("HOME", "XDG_CACHE_HOME", "FEDSHIFT_DATA", "TMPDIR")
SETTINGS: dict[str, Setting] = {
    "as usual": variables(),
    **{f"{name}: unset": variables(**{name: None}) for name in PATHS},
    **{
        f"{name}: {kind}": variables(**{"XDG_CACHE_HOME": None} | {name: PLACES[kind]})
        for name in PATHS
        for kind in (
            "under a closed folder",
            "a closed folder",
            "a file",
            "a long name",
            "a home",
            "nobody's home",
            "under a link to itself",
            "in no folder",
            "nothing",
        )
    },
    "FEDSHIFT_DATA: several": variables(FEDSHIFT_DATA=f"::closed/x:~x/y:notes:{LONG}: :."),
    "neither HOME nor a cache": variables(HOME=None, XDG_CACHE_HOME=None),
    "no stdin": closed(0),
    "no stdout": closed(1),
    "no stderr": closed(2),
    "no streams": closed(0, 1, 2),
    "stdout to a full device": onto("/dev/full"),
    "stdout nobody reads": unread,
    "a narrow terminal": variables(COLUMNS="1", LINES="1"),
    "a terminal of 20 columns": variables(COLUMNS="20"),
    "columns that are no number": variables(COLUMNS="wide"),
    "a dumb terminal": variables(TERM="dumb", FORCE_COLOR="1"),
    "without colours": variables(NO_COLOR="1"),
    "working in a folder that may only be read": lambda: os.chdir("readonly"),
    "working in a folder that is gone": in_a_folder_that_is_gone,
    "working in a closed folder": in_a_closed_folder,
    "no file may grow": limited(resource.RLIMIT_FSIZE, 0),
    "files of a kilobyte": limited(resource.RLIMIT_FSIZE, 1024),
    "few open files": limited(resource.RLIMIT_NOFILE, 8),
    "with a defect": with_a_defect,
}

SHORT = ("-c", "training.rounds=1", "-c", "model.name=linear")
DIAGNOSE = ("diagnose", "--counts", "{at}/counts.csv", "--target", "{at}/target.csv")
COMMANDS: dict[str, Command] = {
    "help": ("--help",),
    "version": ("--version",),
    "no command": (),
    "unknown command": ("rum",),
    "run": ("run", "{at}/f.toml"),
    "run --out": ("run", "{at}/f.toml", "--out", "out"),
    "resume": ("run", "--resume", "{at}/begun"),
    "demo": ("demo", *SHORT),
    "report": ("report", "{at}/whole"),
    "figures": ("report", "{at}/whole", "--out", "page.html", "--figures", "figures"),
    "diagnose": DIAGNOSE,
    "diagnose --report": (*DIAGNOSE, "--report", "page.html"),
    "tables": ("reproduce",),
    "a table": ("reproduce", "fedpals/table1", "--no-train"),
    "methods": ("methods",),
    "a method": ("methods", "fedpals"),
    "datasets": ("datasets",),
    "datasets as json": ("datasets", "--format", "json"),
    "fetch": ("datasets", "fetch", "fashion-mnist-mini"),
    "fetch a file": ("datasets", "fetch", "mnist"),
    "audit": ("audit", "marginals", "{at}/f.toml", "--claims", "{at}/claims.csv"),
    "init": ("deploy", "init", "{at}/f.toml", "federation"),
    "server": ("deploy", "server", "{at}/notes"),
    "client": ("deploy", "client", "{at}/whole", "--server", "localhost:1"),
}
# Commands to which a path is given, `{place}`.
GIVEN: dict[str, Command] = {
    "run FILE": ("run", "{place}", *SHORT),
    "run --out": ("run", "f.toml", "--out", "{place}"),
    "run --resume": ("run", "--resume", "{place}"),
    "demo --out": ("demo", "--out", "{place}", *SHORT),
    "report FOLDER": ("report", "{place}"),
    "report --out": ("report", "whole", "--out", "{place}"),
    "report --out PAGE": ("report", "whole", "--out", "{place}.html"),
    "report --figures": ("report", "whole", "--out", "page.html", "--figures", "{place}"),
    "diagnose --counts": ("diagnose", "--counts", "{place}", "--target", "target.csv"),
    "diagnose --target": ("diagnose", "--counts", "counts.csv", "--target", "{place}"),
    "diagnose --report": ("diagnose", "--counts", "counts.csv", "--target", "target.csv",
                          "--report", "{place}.html"),
    "reproduce --out": ("reproduce", "fedpals/table1", "--no-train", "--out", "{place}"),
    "reproduce --publish": ("reproduce", "fedpals/table1", "--no-train", "--publish", "{place}"),
    "fetch --folder": ("datasets", "fetch", "mnist", "--folder", "{place}"),
    "audit FOLDER": ("audit", "marginals", "{place}", "--claims", "claims.csv"),
    "audit --claims": ("audit", "marginals", "f.toml", "--claims", "{place}"),
    "init FILE": ("deploy", "init", "{place}", "federation"),
    "init FOLDER": ("deploy", "init", "f.toml", "{place}"),
    "server FOLDER": ("deploy", "server", "{place}"),
    "server --out": ("deploy", "server", "whole", "--out", "{place}"),
    "server --resume": ("deploy", "server", "whole", "--resume", "{place}"),
    "client FOLDER": ("deploy", "client", "{place}", "--server", "localhost:1"),
}  # fmt: skip


def laid_out(given: Path, at: Path) -> None:
    """Lay out the files that a cell has in its folder."""
    shutil.copytree(given, at, symlinks=True)
    for name in ("closed", "readonly", "used"):
        (at / name).mkdir()
    (at / "used" / "mine").touch()
    (at / "notes").write_text("mine")
    (at / "loop").symlink_to("loop")
    (at / "dangling").symlink_to("nothing")
    (at / "closed").chmod(0)
    (at / "readonly").chmod(0o555)


def as_anybody() -> None:
    """Drop root's powers, so that permissions hold; optionally become a user without an entry."""
    if os.geteuid() == 0:
        none = (ctypes.c_uint32 * 6)()
        version = (ctypes.c_uint32 * 2)(0x20080522, 0)
        if ctypes.CDLL(None, use_errno=True).capset(version, none):
            raise OSError(ctypes.get_errno(), "capset")

    def unknown(_: object) -> None:
        raise KeyError

    pwd.getpwuid = pwd.getpwnam = unknown  # type: ignore[assignment]


def perform(arguments: Command, at: Path, apply: Setting, writer: int) -> None:
    """In a forked process, which does not come back: the command in its surroundings."""
    code = 99
    try:
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(writer, 2)
        os.chdir(at)
        as_anybody()
        apply()
        # What is inherited was made for other files.
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name) is not None:
                setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115
        sys.argv = ["fedshift", *arguments]
        from fedshift.cli import main

        main()
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def cell(folder: Path, given: Path, setting: str, command: str) -> dict[str, object]:
    """Run one command; return its exit code, its output and the files left incomplete."""
    at = folder / "cell"
    laid_out(given, at)
    line = GIVEN[command] if setting in PLACES else COMMANDS[command]
    arguments = tuple(part.format(at=at, place=PLACES.get(setting, "")) for part in line)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        perform(arguments, at, SETTINGS.get(setting, variables()), writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
        errors = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for shut in (at / "closed", at / "shut"):
        if shut.exists():
            shut.chmod(0o700)
    parts = [str(p.relative_to(at)) for p in at.rglob("*") if p.name.endswith(".part")]
    shutil.rmtree(at)
    return {"code": code, "err": errors, "parts": parts}


def without_a_network(*_: object, **__: object) -> None:
    raise urllib.error.URLError("no network here")


def load_all() -> None:
    """Load what the commands need, before forking; not Flower, which starts threads."""
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_pdf
    import matplotlib.figure
    import matplotlib.pyplot  # noqa: F401
    import torch

    import fedshift.cli
    import fedshift.datasets
    import fedshift.experiments

    torch.set_num_threads(1)
    urllib.request.urlopen = without_a_network
    for package in fedshift.cli, fedshift.experiments, fedshift.datasets:
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if not module.name.endswith(("on_flower", "deployed")):
                importlib.import_module(module.name)


def main() -> None:
    """Answers go to the original stdout; the commands write elsewhere."""
    folder, given = Path(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    load_all()
    for line in sys.stdin:
        setting, command = json.loads(line)
        print(json.dumps(cell(folder, given, setting, command)), file=answers, flush=True)


if __name__ == "__main__":
    main()
