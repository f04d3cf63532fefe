"""Check that a federation's server can be reached, and that it is the right one."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from fedshift.errors import InputError

WAIT = 10.0


def address_of(server: str, what: str = "server") -> tuple[str, int]:
    """(host, port) of "host:port". Raises InputError, which names it as `what`."""
    host, _, port = server.rpartition(":")
    if not host or set("/@ ") & set(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f'{what} "{server}": write it as host:port, as in 192.0.2.7:8000')
    return host.strip("[]"), int(port)


def answers(server: str, authority: Path) -> str:
    """Why a server cannot be reached now; "" if it can.

    Raises InputError for a certificate that is not signed by `authority`, is not valid today, or is
    for another host name, and for a server without TLS: Flower's SuperNode would retry for ever.
    """
    host, port = address_of(server)
    context = ssl.create_default_context(cafile=str(authority))
    try:
        # A handshake and no more: it shows whether the certificate is right.
        with (
            socket.create_connection((host, port), WAIT) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return ""
    except ssl.SSLCertVerificationError as e:
        raise InputError(
            f"{server} shows a certificate that {authority} does not vouch for: "
            f"{e.verify_message}. Is it this federation's server, under a name that "
            "`fedshift deploy init --host` was given?"
        ) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return f"{server} hangs up: it may be starting or ending"
    except ssl.SSLError as e:
        raise InputError(
            f"{server} speaks no TLS ({e.reason}): is it a federation's server?"
        ) from None
    except OSError as e:
        return f"{server} cannot be reached: {e.strerror or e}"
