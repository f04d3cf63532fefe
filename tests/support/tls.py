"""A server that shows a certificate."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def tls_server(folder: Path | None, ahead: float | None = None) -> Iterator[str]:
    """The address of a server that shows the certificate of a folder, or speaks no TLS.

    ahead: it answers one request, with a clock that is so many seconds ahead; None: it hangs up.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one = s.accept()[0]
                    with contextlib.suppress(OSError), one:
                        if folder is None:
                            one.sendall(b"220 welcome\r\n" * 9)
                            continue
                        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                        context.load_cert_chain(folder / "server.crt", folder / "server.key")
                        with context.wrap_socket(one, server_side=True) as wrapped:
                            if ahead is not None:
                                wrapped.recv(4096)
                                wrapped.sendall(answer(ahead))

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{s.getsockname()[1]}"
        s.shutdown(socket.SHUT_RDWR)


def answer(ahead: float) -> bytes:
    """An HTTP server's refusal, which has its time."""
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)
    date = email.utils.format_datetime(now, usegmt=True)
    return f"HTTP/1.1 403 Forbidden\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode()
