"""The end of a command: always one message and a documented exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from typing import IO, Any

import typer

from fedshift.cli.console import show_error, tell
from fedshift.cli.loading import INTERRUPTED, TERMINATED, failure_line, stop_line
from fedshift.errors import FedshiftError, InputError, visible

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Error numbers that mean a problem of the path, and no defect of the program.
REFUSED = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR,
    errno.ESTALE, *FULL,
)  # fmt: skip


def perform(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; every failure becomes one message."""
    _prepare_streams()
    try:
        code = _exit_code(app, arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. That is no failure.
        _discard(sys.stdout, sys.stderr)
        return 0
    except OSError as e:
        _discard(sys.stdout)
        why = InputError(f"the output cannot be written: {e.strerror}; send it elsewhere")
        show_error(why, arguments)
        return why.exit_code
    return code


def _exit_code(app: typer.Typer, arguments: Sequence[str]) -> int:
    try:
        with _termination():
            _check_current_folder()
            _check_empty(arguments)
            return _invoke(app, arguments)
    except FedshiftError as e:
        return _error(e, arguments)
    except KeyboardInterrupt as e:
        return _interrupted(e, arguments)
    except Exception as e:
        # Usage errors are recognised by a method and not by their class, since recent versions of
        # typer come with a click of their own.
        if hasattr(e, "format_message"):
            return _usage(e, arguments)
        if isinstance(e, BrokenPipeError) or (
            isinstance(e, OSError) and e.filename is None and e.errno in FULL
        ):
            raise
        return _error(out_of_resources(e) or _refused_path(e) or _internal(e), arguments)


def _check_current_folder() -> None:
    """Raise InputError if the current folder is gone: without it, libraries end the process."""
    try:
        os.getcwd()
    except OSError as e:
        raise InputError(f"the current folder: {e.strerror}; go to another one") from None


def _check_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty argument: as a path it would mean the current folder."""
    for before, argument in itertools.pairwise(("", *arguments)):
        option, equals, value = argument.partition("=")
        if argument == "" and before not in ("-c", "--config"):
            what = before if before.startswith("-") else "an argument"
        elif option.startswith("--") and equals and not value:
            what = option
        else:
            continue
        raise InputError(f"{what} is given an empty text; give it a value, or leave it out")


def _invoke(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run `app()` without its handling of exceptions."""
    # If the shell asks for completions, typer answers and exits.
    if "_FEDSHIFT_COMPLETE" in os.environ:
        app()
    command = typer.main.get_command(app)
    try:
        # Not click's main(), which would print errors and choose exit codes of its own.
        with command.make_context("fedshift", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as e:
        return e.exit_code
    except SystemExit as e:
        # rich exits like this if its pipe is closed.
        if isinstance(e.__context__, BrokenPipeError):
            raise e.__context__ from None
        raise
    return 0


def _error(error: FedshiftError, arguments: Sequence[str]) -> int:
    show_error(error, arguments)
    return error.exit_code


def _usage(error: Any, arguments: Sequence[str]) -> int:
    # typer has added a suggestion already; recent versions of click would add another.
    if "Did you mean" in getattr(error, "message", ""):
        error.possibilities = None
    # Usage errors repeat what was typed, with its control characters.
    error.message = visible(getattr(error, "message", ""))
    if _in_json(arguments):
        return _error(InputError(error.format_message()), arguments)
    error.show()
    return int(error.exit_code)


def _interrupted(error: KeyboardInterrupt, arguments: Sequence[str]) -> int:
    # Both signals arrive as KeyboardInterrupt. SIGTERM's handler adds its exit code.
    code = TERMINATED if TERMINATED in error.args else INTERRUPTED
    message = "; ".join(["interrupted", *getattr(error, "__notes__", ())])
    tell(stop_line(arguments, message, code) or message)
    return code


def _in_json(arguments: Sequence[str]) -> bool:
    return failure_line(arguments, "", 0) is not None


@contextlib.contextmanager
def _termination() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, with folders left in order."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare_streams() -> None:
    """Print "?" for characters that the terminal cannot encode; replace closed streams."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard(*streams: IO[str]) -> None:
    """Discard buffered output, so that the interpreter's last flush succeeds."""
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def out_of_resources(error: Exception) -> FedshiftError | None:
    """An InputError for missing memory, files or processes: no defect of the program."""
    exhausted = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
    if isinstance(error, OSError) and error.errno in exhausted:
        return InputError(
            f"the system gives this process no more: {error.strerror}; ask for fewer --workers, or "
            "raise its limits (ulimit)"
        )
    # torch raises RuntimeError with this text.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        match = re.search(r"allocate (\d+) bytes", str(error))
        size = f" for {int(match[1]):,} bytes" if match else ""
        return InputError(
            f"not enough memory{size}; take a smaller network, training.batch or cohort, or fewer "
            "--workers"
        )
    return None


def _refused_path(error: Exception) -> FedshiftError | None:
    """An InputError for a path that the system refuses: no defect of the program either."""
    if not isinstance(error, OSError):
        return None
    if error.filename is not None and error.errno in REFUSED:
        return InputError(f"{error.filename}: cannot be read or written: {error.strerror}")
    if "temporary directory" in str(error):
        return InputError("no folder for temporary files can be written; name one in $TMPDIR")
    return None


def _internal(error: Exception) -> FedshiftError:
    """An unforeseen failure: the traceback goes to a file that the message names."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="fedshift-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            traceback.print_exception(error, file=log)
        place = log.name
    except OSError:
        traceback.print_exception(error)
        place = "the lines above"
    kind = type(error).__name__
    return FedshiftError(
        f"internal error ({kind}: {error}). This is a defect of fedshift; please report it with "
        f"{place}"
    )
