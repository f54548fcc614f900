"""The Host header of requests: a server without keys on a loopback address answers only those that name this machine.

Otherwise any page could use it by DNS rebinding: the page's own name is made to resolve to 127.0.0.1, and the browser
takes the server for the page's origin. The Host header still has the page's name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from handler.http.security.access import ANY_HOST, Access

_LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")


class AllowedHosts:
    """
    Args:
        names: in lower case; None: any.
    """

    def __init__(self, names: Iterable[str] | None) -> None:
        self._names = None if names is None else frozenset(names)

    @classmethod
    def of(cls, access: Access, host: str, address: str) -> AllowedHosts:
        """
        Args:
            host: as the command line has it, which is allowed.
            address: where the socket listens.
        """
        is_checked = bool(access.hosts) or (not access.keys and _is_loopback(address))
        if not is_checked or ANY_HOST in access.hosts:
            return cls(None)
        return cls([*_LOCAL, host.lower(), *access.hosts])

    def admits(self, header: str) -> bool:
        """Whether a request with this Host header is answered. One without the header cannot come from a browser."""
        if self._names is None or not header:
            return True
        name = _name(header)
        return name in self._names or _is_loopback(name)

    @staticmethod
    def refusal(header: str) -> str:
        name = _name(header)[:100]
        return (
            f"the Host header names {name}, which is not this machine: a web page that uses DNS rebinding sends such "
            f"requests; to answer them start the server with --allow-host {name}"
        )


def _name(header: str) -> str:
    """Without port, brackets and a final dot (`localhost.` is fully qualified); a malformed header is no name."""
    match = _HOST.fullmatch(header)
    return (match[1] or match[2] or "").lower().removesuffix(".") if match else header


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
