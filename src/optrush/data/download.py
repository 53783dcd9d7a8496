"""Download an image from a row's web address: in bounded time, and never from a private network."""

from __future__ import annotations

import functools
import http.client
import ipaddress
import socket
import threading
import urllib.request
from contextlib import closing, suppress
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from optrush.data.strict_json import quoted
from optrush.errors import first_line

REMOTE = ("http://", "https://")
DOWNLOAD_s = 60.0  # includes name resolution, redirects and the response header


def is_outside(address: str) -> bool:
    """Return whether an IP address is public; also checks an embedded IPv4 address."""
    ip: Any = ipaddress.ip_address(address)
    if ip.version == 6:
        within = ip.ipv4_mapped or ip.sixtofour
        translated = ip in ipaddress.ip_network("64:ff9b::/96")  # behind NAT64 every IPv4 address is one of these
        ip = ipaddress.ip_address(int(ip) & 0xFFFFFFFF) if translated else within or ip
    return bool(ip.is_global and not ip.is_multicast)


class _Web(urllib.request.HTTPRedirectHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Open public addresses only; close connections that are still open after DOWNLOAD_s."""

    def __init__(self) -> None:
        urllib.request.HTTPSHandler.__init__(self)
        self.sockets, self.late = list[socket.socket](), False
        self.timer = threading.Timer(DOWNLOAD_s, self.end)
        self.timer.daemon = True
        self.timer.start()

    def end(self) -> None:
        self.late = True
        for held in self.sockets:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.timer.cancel()
        for held in self.sockets:
            held.close()

    def redirect_request(self, *given: Any) -> urllib.request.Request | None:
        if not given[-1].startswith(REMOTE):  # such as ftp, which urllib would follow
            raise ValueError(f"it leads to {quoted(given[-1][:80])}")
        return super().redirect_request(*given)

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.answer(http.client.HTTPConnection, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.answer(http.client.HTTPSConnection, req)

    def answer(self, kind: type[http.client.HTTPConnection], req: urllib.request.Request) -> Any:
        parts = urlsplit(req.full_url)
        proxied = parts.netloc != req.host  # set by the environment; a proxy may be in a private network
        if proxied:
            with suppress(socket.gaierror):  # the proxy resolves names itself
                _places(parts.hostname or "", parts.port)

        def connection(host: str, **given: Any) -> Any:
            made: Any = kind(host, **given)
            made._create_connection = functools.partial(self.reach, proxied)  # TLS still checks the name
            return made

        return self.do_open(connection, req)

    def reach(self, trusted: bool, place: tuple[str, int], timeout: float, _: Any) -> socket.socket:
        """Connect to the checked address itself: a second lookup could return another one."""
        error: OSError | None = None
        for address in [place[0]] if trusted else _places(*place):
            try:
                made = socket.create_connection((address, place[1]), timeout)
            except OSError as failed:
                error = failed
                continue
            self.sockets.append(made.dup())  # TLS takes over the socket
            if self.late:
                self.end()
            return made
        raise error or OSError("no address")


def _places(host: str, port: int | None) -> list[str]:
    """Return the IP addresses of a name; raises ValueError if one is not public."""
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for entry in addresses:
        if not is_outside(entry):
            raise ValueError(f"{quoted(host)} is {entry}, an address of your network; save the image next to the data")
    return addresses


def download(address: str, most: int) -> bytes:
    """Return the bytes at an address.

    Raises ValueError: a timeout, more than `most` bytes, or an address that is not public.
    """
    parts, left = list[bytes](), most
    with closing(_Web()) as web:
        try:
            request = urllib.request.Request(address, headers={"User-Agent": "optrush"})
            with urllib.request.build_opener(web).open(request, timeout=DOWNLOAD_s / 2) as answer:
                while left >= 0 and (piece := answer.read1(1 << 16)):
                    parts.append(piece)
                    left -= len(piece)
                if left < 0:
                    raise ValueError(f"more than {most:,} bytes")
                if answer.length and not web.late:
                    raise ValueError(f"cut off {answer.length:,} bytes before its end")
        except (OSError, ValueError, HTTPException) as error:
            late = f"it takes more than {DOWNLOAD_s:g} s"
            raise ValueError(f"{quoted(address[:80])}: {late if web.late else first_line(error)}") from None
        if web.late:
            raise ValueError(f"{quoted(address[:80])}: it takes more than {DOWNLOAD_s:g} s")
    if not parts:
        raise ValueError(f"{quoted(address[:80])}: no bytes")
    return b"".join(parts)
