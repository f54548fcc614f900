"""Public addresses: those that a fetch for a client may connect to. Names are resolved once, and checked then."""

from __future__ import annotations

import functools
import ipaddress
import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from handler.core.errors import InvalidPayload
from handler.core.event_loop import run_in_daemon_thread

_NOT_PUBLIC = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
"""IANA's registry of special-purpose IPv4 addresses, and multicast. Python's own list depends on its version."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""What IANA hands out of IPv6; loopback, private, link-local and multicast addresses lie outside."""

_SPECIAL = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Teredo and other protocols, documentation, 6to4: within `_UNICAST`, from the registry for IPv6."""

_HOLDS_IPV4 = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""Mapped addresses (RFC 4291), and those of a NAT64 (RFC 6052): the last 32 bits are an IPv4 address."""


def is_public(text: str) -> bool:
    """Whether an address belongs to the public internet. An IPv6 address may have a zone."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _HOLDS_IPV4):
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        else:
            return address in _UNICAST and not any(address in network for network in _SPECIAL)
    return not any(address in network for network in _NOT_PUBLIC)


def check_address(text: str) -> None:
    """Raise InvalidPayload unless an address is public."""
    if not is_public(text):
        raise InvalidPayload("its host has an address that is not public")


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses. aiohttp connects to what it returns, and does not ask again.

    Each look-up has a thread of its own: one that takes long holds up neither others nor the end of the process.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all addresses of a name.

        Raises:
            InvalidPayload: one of them is not public.
            OSError: there is none.
        """
        look_up = functools.partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        found = [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for family, _, protocol, _, address in await run_in_daemon_thread(look_up)
        ]
        for result in found:
            check_address(result["host"])
        return found

    async def close(self) -> None:
        pass
