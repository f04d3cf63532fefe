"""Flower's commands, which here talk to each other over a socket that only its owner can open.

`python -m fedshift.deploy.inside COMMAND ...` is Flower's COMMAND with three differences:

- Whoever reaches a port of Flower's can act as the server or as a client: tasks are given to the
  first that asks, and each task's token stands in the list of processes. So starting runs,
  registering keys and all work on tasks go over a Unix socket in a folder of mode 0700 (`SOCKET`).
- The token of a task comes by the standard input, not as an argument.
- Only tasks of servers and clients are run, and a client runs the app that is installed (`app`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import distribution
from threading import Event
from typing import TYPE_CHECKING, Any

from fedshift.deploy.app import run_the_installed_app
from fedshift.deploy.log_records import show_controls
from fedshift.errors import InputError
from fedshift.flower.installed import put_in_place
from fedshift.flower.notices import notify

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult

# The environment variable that holds the socket's path; the path is no secret.
SOCKET = "FEDSHIFT_SOCKET"
# Bytes of a socket's path that every system allows (macOS: 103, Linux: 107).
LONGEST = 103
# Seconds between two looks whether a process is there.
LOOK = 1.0
# Seconds within which a signal reaches all processes of a group.
GROUP = 1.0
TASKS = ("flwr-serverapp", "flwr-clientapp")


@contextlib.contextmanager
def private_socket() -> Iterator[dict[str, str]]:
    """The environment variable of a new socket, which this user alone can open.

    Raises InputError where the folder for temporary files cannot be used for it.
    """
    try:
        # Of mode 0700, whatever the umask. Not in the federation's folder: paths of sockets are
        # short, and some disks have none.
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
    # -P: modules in the current folder must not take the place of installed ones.
    return [sys.executable, "-P", "-m", "fedshift.deploy.inside", name, *arguments]


@contextlib.contextmanager
def executor(address: str, *trust: str, needed: bool = False) -> Iterator[Event]:
    """Flower's SuperExec, which starts the processes of tasks; it ends with the block.

    needed: this process ends, with code 1, where the SuperExec ends before the block does, or
    before the event is set that the block gets. A SuperNode without one stays connected and answers
    nothing. A SuperLink goes on: the server looks for each of its processes (`watching`).
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
    # A signal to the whole group may reach it first.
    if over.wait(GROUP):
        return
    how = f"by signal {-code}, perhaps for lack of memory" if code < 0 else f"with code {code}"
    print(f"Flower's SuperExec was ended {how}", file=sys.stderr, flush=True)
    # Not by an exception: the main thread waits for messages.
    os._exit(1)


def _tell_of_a_kill(process: subprocess.Popen[str]) -> None:
    """Tell a client's operator at once what Flower notices after a minute, and tells the server."""
    code = process.wait()
    if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT):
        how = f"was ended by signal {-code}, perhaps for lack of memory"
        notify(trouble=f"this client gave the server no answer: the process of its app {how}")


class Launcher:
    """Flower's `Executor`: a process per task, for tasks of servers and clients and no others."""

    def get_eligible_capacity(
        self, supported_task_types: set[Any], **_: object
    ) -> tuple[set[Any], set[str]]:
        """The tasks to ask for."""
        from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

        return {kind for kind in supported_task_types if TASK_TYPE_TO_COMMAND[kind] in TASKS}, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a task's process, and give it the task's token."""
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
        process = subprocess.Popen(
            inside(name, *arguments), stdin=subprocess.PIPE, stdout=out, stderr=out, text=True
        )
        assert process.stdin is not None
        # A process that has ended already is noticed by Flower, which waits for its signs of life.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(spec.token + "\n")
        threading.Thread(target=_tell_of_a_kill, args=(process,), daemon=True).start()
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """There is nothing to tidy up between tasks."""

    def close(self) -> None:
        """There is nothing to give back."""


def call_over(path: str) -> None:
    """Have all of Flower's clients in this process call over the socket at this path."""
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
    """End this process at once when the one that listens at this path is gone.

    Flower looks whether its parent exists: one that was killed still does where it is waited for by
    no process, as in a container. A server's app would keep the run's folder locked, and try to
    reach its SuperLink, for minutes. What it has written is whole at any time.
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
                        # Not by an exception: other threads wait for answers that cannot come.
                        os._exit(1)
                except OSError:
                    pass  # a busy one is there
            time.sleep(LOOK)

    threading.Thread(target=look, daemon=True).start()


def serve_over(path: str) -> None:
    """Have the SuperNode of this process serve tasks over the socket at this path."""
    import uvicorn
    from flwr.supercore.exit import add_exit_handler

    # A function of the same name hides this module.
    node: Any = import_module("flwr.supernode.cli.flower_supernode")
    start = node.start_client_internal

    def started(*, runtime_api_address: str, **more: Any) -> None:
        # Now the SuperNode listens, so the socket is its own.
        with executor(runtime_api_address, "--insecure", needed=True) as over:
            # A SuperNode that was told to end has time to say so to the server.
            add_exit_handler(over.set)
            start(runtime_api_address=runtime_api_address, **more)

    # With `uds`, uvicorn opens no port.
    uvicorn.Config = functools.partial(uvicorn.Config, uds=path)  # type: ignore[assignment,misc]
    put_in_place(node, "start_client_internal", started)


def prepare(name: str, path: str) -> None:
    """Change what one of Flower's commands needs to have changed."""
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


def main(arguments: Sequence[str]) -> None:
    """Run one of Flower's commands."""
    name, *rest = arguments
    if name in TASKS:
        rest += ["--token", sys.stdin.readline().strip()]
    sys.argv = [name, *rest]
    show_controls()
    prepare(name, os.environ[SOCKET])
    (command,) = distribution("flwr").entry_points.select(group="console_scripts", name=name)
    command.load()()


if __name__ == "__main__":
    main(sys.argv[1:])
