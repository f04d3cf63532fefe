"""Check that a federation's server can be reached, and that it is the right one."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import socket
import ssl
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedshift.errors import InputError

WAIT = 10.0
# OpenSSL's error codes for a certificate that is not valid yet, or not any more.
CLOCK = {9: "is not valid yet", 10: "has expired"}
# Seconds by which a client's clock may be ahead of the server's, or behind it. These are Flower's
# limits for the time that a SuperNode signs.
AHEAD, BEHIND = 5.0, 305.0


def address_of(server: str, what: str = "server") -> tuple[str, int]:
    """(host, port) of "host:port". Raises InputError, which names it as `what`."""
    host, _, port = server.rpartition(":")
    good = port.isdecimal() and 0 < int(port) < 65536 and not set("/@ ") & set(host)
    try:
        # idna refuses what cannot be resolved: empty parts, as in "fed..org", or 64 letters.
        good = good and bool(host.encode("idna"))
    except UnicodeError:
        good = False
    if not good:
        raise InputError(f'{what} "{server}": write it as host:port, as in 192.0.2.7:8000')
    return host.strip("[]"), int(port)


def _trust_context(authority: Path) -> ssl.SSLContext:
    """A context that trusts only this certificate. Raises InputError if it cannot be read."""
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as e:
        why = "is no certificate" if isinstance(e, ssl.SSLError) else e.strerror
        raise InputError(f"{authority}: {why}; bring back the federation's ca.crt") from None


def answers(server: str, authority: Path, wait: float = WAIT) -> str:
    """Why a server cannot be reached now, within `wait` seconds; "" if it can.

    Raises InputError if waiting would not help (Flower's SuperNode would retry for ever): for a
    certificate that is not signed by `authority`, is not valid today, or is for another host name,
    for a server without TLS, and for an `authority` that cannot be read.
    """
    host, port = address_of(server)
    context = _trust_context(authority)
    try:
        # Only a TLS handshake, which shows whether the certificate is right.
        with (
            socket.create_connection((host, port), wait) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return ""
    except ssl.SSLCertVerificationError as e:
        if e.verify_code in CLOCK:
            now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
            raise InputError(
                f"{server}: its certificate {CLOCK[e.verify_code]} by this machine's clock, {now}: "
                "set the clock if it is wrong, else run `fedshift deploy renew` on the server"
            ) from None
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
    except TimeoutError:
        return f"{server} cannot be reached: no answer within {wait:g} s"
    except OSError as e:
        return f"{server} cannot be reached: {e.strerror or e}"


def clocks(server: str, authority: Path) -> str:
    """Why a server that answers will refuse the times that this machine signs; "" if it will not.

    The server's time is in the headers of any of its answers.
    """
    host, port = address_of(server)
    context = _trust_context(authority)
    connection = http.client.HTTPSConnection(host, port, timeout=WAIT, context=context)
    try:
        with contextlib.closing(connection):
            connection.request("HEAD", "/")
            theirs = parsedate_to_datetime(connection.getresponse().headers["Date"])
    except (OSError, http.client.HTTPException, TypeError, ValueError):
        return ""
    ahead = (datetime.datetime.now(datetime.UTC) - theirs).total_seconds()
    # 1: the server's time is truncated to the second.
    if 1 - BEHIND < ahead < AHEAD:
        return ""
    where = "ahead of" if ahead > 0 else "behind"
    return (
        f"this machine's clock is {abs(ahead):.0f} s {where} that of {server}, which takes clients "
        f"up to {AHEAD:g} s ahead and {BEHIND:g} s behind: set both clocks, as by NTP"
    )
