"""A server that shows a certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def tls_server(folder: Path | None) -> Iterator[str]:
    """The address of something that shows the certificate of a folder, or speaks no TLS."""
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
                        context.wrap_socket(one, server_side=True).close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{s.getsockname()[1]}"
        s.shutdown(socket.SHUT_RDWR)
