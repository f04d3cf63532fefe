"""Flower's commands, changed to talk to each other over a socket that only its owner can open.

`python -m fedshift_deploy.inside COMMAND ...` is Flower's COMMAND with four differences:

- It uses a Unix socket in a folder of mode 0700 (`SOCKET`) for starting runs, registering keys and
  all work on tasks. With Flower's ports, any user of the machine could act as the server or as a
  client: a task is given to the first process that asks, with a token that `ps` shows.
- It reads the token of a task from standard input, not from an argument.
- It runs only tasks of servers and clients, and a client runs the app that is installed (`app`).
- A client's tasks are run by copies of one process (`forking`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import distribution
from threading import Event
from typing import TYPE_CHECKING, Any

from fedshift.errors import InputError
from fedshift.flower.installed import put_in_place
from fedshift_deploy.app import run_the_installed_app
from fedshift_deploy.forking import (
    CAN_FORK,
    PERHAPS,
    UNANSWERED,
    fork_for_each,
    import_what_tasks_need,
    notify_of_a_kill,
)
from fedshift_deploy.log_records import show_controls

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult

# The environment variable with the socket's path, which is no secret.
SOCKET = "FEDSHIFT_SOCKET"
# Longest path of a socket, in bytes, that all systems allow (macOS: 103, Linux: 107).
LONGEST = 103
# Seconds between two checks whether a process is still there.
LOOK = 1.0
# Seconds within which a signal to a group reaches all of its processes.
GROUP = 1.0
CLIENTAPP = "flwr-clientapp"
TASKS = ("flwr-serverapp", CLIENTAPP)


@contextlib.contextmanager
def private_socket() -> Iterator[dict[str, str]]:
    """A path for a new socket that only this user can open, as an environment variable.

    Raises InputError if the folder for temporary files cannot be used for it.
    """
    try:
        # This has mode 0700, whatever the umask. The federation's folder would not do: its path may
        # be too long, and some file systems have no sockets.
        folder = tempfile.TemporaryDirectory(prefix="fedshift-")
    except OSError as e:
        raise InputError(f"no temporary folder can be made: {e.strerror}; set TMPDIR") from None
    with folder as name:
        path = os.path.join(name, "flower")
        if len(os.fsencode(path)) > LONGEST:
            raise InputError(f"{name}: too long for a socket's path; set TMPDIR to a shorter one")
        yield {SOCKET: path}


def listening(path: str) -> socket.socket:
    """A Unix socket at this path, for a server to listen on."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(path)
    return made


def inside(name: str, *arguments: str) -> list[str]:
    """The command line of one of Flower's commands, run as this module says."""
    # -P: modules in the current folder must not replace installed ones.
    return [sys.executable, "-P", "-m", "fedshift_deploy.inside", name, *arguments]


@contextlib.contextmanager
def executor(address: str, *trust: str, needed: bool = False) -> Iterator[Event]:
    """Run Flower's SuperExec, which starts the processes of tasks, for the time of the block.

    needed: end this process, with code 1, if the SuperExec ends before the block, or before the
    yielded event is set. That is for SuperNodes, which would stay connected but never answer. A
    SuperLink may go on, because the server checks each of its processes (`watching`).
    """
    arguments, over = ["--runtime-api-address", address, "--parent-pid", str(os.getpid())], Event()
    with subprocess.Popen(inside("flower-superexec", *trust, *arguments)) as process:
        if needed:
            threading.Thread(target=_end_without_it, args=(process, over), daemon=True).start()
        try:
            yield over
        finally:
            over.set()
            process.terminate()


def _end_without_it(process: subprocess.Popen[bytes], over: Event) -> None:
    code = process.wait()
    # A signal to the whole group may reach the SuperExec first: wait whether it reaches us, too.
    if over.wait(GROUP):
        return
    how = f"by signal {-code}, perhaps for lack of memory" if code < 0 else f"with code {code}"
    print(f"Flower's SuperExec was ended {how}", file=sys.stderr, flush=True)
    # An exception would not end the main thread, which waits for messages.
    os._exit(1)


def _watch(process: subprocess.Popen[bytes]) -> None:
    notify_of_a_kill(process.wait(), PERHAPS if CAN_FORK else UNANSWERED)


def _wrote(token: str, process: subprocess.Popen[bytes]) -> bool:
    """Write a line to the process's standard input. False if it has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(f"{token}\n".encode())
    except BrokenPipeError:
        return False
    return True


class Launcher:
    """Flower's `Executor`: one process per task, only for tasks of servers and clients."""

    def __init__(self) -> None:
        # It waits for the tokens of more tasks (`forking`).
        self._waiting: subprocess.Popen[bytes] | None = None

    def get_eligible_capacity(
        self, supported_task_types: set[Any], **_: object
    ) -> tuple[set[Any], set[str]]:
        """The types of tasks to ask for: those that Flower offers and `TASKS` names."""
        from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

        return {kind for kind in supported_task_types if TASK_TYPE_TO_COMMAND[kind] in TASKS}, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a task's process, and write the task's token to its standard input."""
        from flwr.supercore.constant import TASK_TYPE_TO_COMMAND
        from flwr.supercore.superexec.executor import LaunchResult

        name = TASK_TYPE_TO_COMMAND[spec.task_type]
        if name not in TASKS:
            return LaunchResult.failed(f"tasks of {name} are not run here")
        trust = ["--root-certificates", str(spec.root_certificates_path)]
        arguments = ["--runtime-api-address", spec.runtime_api_address]
        arguments += ["--insecure"] if spec.insecure else trust
        arguments += ["--parent-pid", str(spec.parent_pid)]
        out = subprocess.DEVNULL if spec.suppress_output else None
        command, token = inside(name, *arguments), spec.token
        waiting = self._waiting
        if waiting is not None and waiting.args == command and _wrote(token, waiting):
            return LaunchResult.accepted()
        process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=out, stderr=out
        )
        # If the process has ended already, Flower notices that by its missing heartbeats.
        _wrote(token, process)
        if name == CLIENTAPP and CAN_FORK:
            self._waiting = process
        elif process.stdin is not None:
            process.stdin.close()
        threading.Thread(target=_watch, args=(process,), daemon=True).start()
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Nothing to clean up between tasks."""

    def close(self) -> None:
        """Nothing to release: the process that waits ends with this one, which has its pipe."""


def call_over(path: str) -> None:
    """Make all of Flower's HTTP clients in this process use the socket at this path."""
    import httpx
    from flwr.supercore.protobuf.client import ProtobufClient

    made: Any = ProtobufClient.__init__

    @functools.wraps(made)
    def init(self: Any, base_url: str, *, verify: Any = True, **more: Any) -> None:
        made(self, base_url, verify=verify, **more)
        timeout = self._client.timeout
        self._client.close()
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(verify=verify, uds=path), timeout=timeout
        )

    # Flower has no hook for the transport.
    ProtobufClient.__init__ = init  # type: ignore[method-assign]


def end_without(path: str) -> None:
    """End this process at once when the process that listens at this path is gone.

    Flower checks whether its parent exists. But a killed parent that no process waits for, as in a
    container, still exists as a zombie. A server's app would then keep the run's folder locked for
    minutes, and go on trying to reach its SuperLink. Ending at once is safe, because files are
    always written whole.
    """

    def look() -> None:
        seen = False
        while True:
            with socket.socket(socket.AF_UNIX) as s:
                try:
                    s.connect(path)
                    seen = True
                except (ConnectionRefusedError, FileNotFoundError):
                    if seen:
                        print("what started this process is gone, so it ends", file=sys.stderr)
                        # An exception would not end the other threads, which wait for answers.
                        os._exit(1)
                except OSError:
                    pass  # the listener is there, but busy
            time.sleep(LOOK)

    threading.Thread(target=look, daemon=True).start()


def serve_over(path: str) -> None:
    """Make the SuperNode in this process serve tasks over the socket at this path."""
    import uvicorn
    from flwr.supercore.exit import add_exit_handler

    # import_module, because in the package a function of the same name hides this module.
    node: Any = import_module("flwr.supernode.cli.flower_supernode")
    start = node.start_client_internal

    def started(*, runtime_api_address: str, **more: Any) -> None:
        # Flower calls this when the SuperNode listens, so that the SuperExec can connect.
        with executor(runtime_api_address, "--insecure", needed=True) as over:
            # A SuperNode that is told to end needs time to sign off at the server.
            add_exit_handler(over.set)
            start(runtime_api_address=runtime_api_address, **more)

    # With `uds`, uvicorn opens no port.
    uvicorn.Config = functools.partial(uvicorn.Config, uds=path)  # type: ignore[assignment,misc]
    put_in_place(node, "start_client_internal", started)


def prepare(name: str, path: str) -> None:
    """Make the changes that one of Flower's commands needs."""
    if name == "flower-supernode":
        serve_over(path)
        return
    call_over(path)
    if name != "flwr":
        end_without(path)
    if name == "flower-superexec":
        superexec: Any = import_module("flwr.supercore.superexec.run_superexec")
        put_in_place(superexec, "get_executor", lambda *_, **__: Launcher())
    elif name == "flwr-clientapp":
        run_the_installed_app()


def command_of(name: str) -> Callable[[], object]:
    """One of Flower's commands, imported."""
    (command,) = distribution("flwr").entry_points.select(group="console_scripts", name=name)
    made: Callable[[], object] = command.load()
    return made


def token_for(name: str) -> str:
    """The token of a task, in the process for it."""
    if name == CLIENTAPP and CAN_FORK:
        import_what_tasks_need(lambda: command_of(name))
        return fork_for_each(sys.stdin).strip()
    return sys.stdin.readline().strip()


def main(arguments: Sequence[str]) -> None:
    """Run one of Flower's commands."""
    name, *rest = arguments
    show_controls()
    if name in TASKS:
        rest += ["--token", token_for(name)]
    sys.argv = [name, *rest]
    prepare(name, os.environ[SOCKET])
    command_of(name)()


if __name__ == "__main__":
    main(sys.argv[1:])
