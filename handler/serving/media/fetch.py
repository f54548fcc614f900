"""Fetches media files over HTTP from allowed hosts, or from an allowed directory."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from handler.core.errors import InvalidPayload
from handler.core.loop import run_in_daemon_thread, wait_for
from handler.core.media import MEDIA
from handler.core.numbers import is_digits
from handler.serving.media.loader import ANY_HOST, MediaRules

_NOT_PUBLIC = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
"""Special-purpose IPv4 addresses (IANA registry) and multicast addresses. Python's own list varies by version."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""Global unicast IPv6 addresses that IANA assigns. Loopback, private, link-local and multicast addresses are outside of
this range.
"""

_SPECIAL = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Special-purpose addresses within `_UNICAST`, from the IANA registry: Teredo and others, documentation, 6to4."""

_HOLDS_IPV4 = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""Networks whose addresses end with an IPv4 address: IPv4-mapped (RFC 4291) and NAT64 (RFC 6052)."""


def is_public(text: str) -> bool:
    """Return whether an IP address belongs to the public internet. An IPv6 address may have a zone."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _HOLDS_IPV4):
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        else:
            return address in _UNICAST and not any(address in network for network in _SPECIAL)
    return not any(address in network for network in _NOT_PUBLIC)


def check_address(text: str) -> None:
    """Raise InvalidPayload if an IP address is not public."""
    if not is_public(text):
        raise InvalidPayload("its host has an address that is not public")


class PublicResolver(AbstractResolver):
    """A resolver that accepts only host names with public addresses. aiohttp connects to the returned addresses without
    another lookup.

    Each lookup runs on its own thread, so that a slow lookup delays neither other lookups nor the exit of the process.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all addresses of a host name.

        Raises:
            InvalidPayload: one of the addresses is not public.
            OSError: the name cannot be resolved.
        """
        addresses = await run_in_daemon_thread(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        results = [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for family, _, protocol, _, address in addresses
        ]
        for result in results:
            check_address(result["host"])
        return results

    async def close(self) -> None:
        pass


_SCHEMES = ("http", "https")
_REDIRECTS, MAX_REDIRECTS = (301, 302, 303, 307, 308), 3
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "lmi-handler"}
_INVALID = "it is not a valid URL"
_CHUNK = 1 << 16  # bytes


class Fetcher:
    """An HTTP client for media, without proxies, cookies or compression. It belongs to the event loop that created it.

    Args:
        rules: rules for media.
        connections: maximum number of concurrent connections.
    """

    def __init__(self, rules: MediaRules, connections: int) -> None:
        self._rules = rules
        connector = aiohttp.TCPConnector(
            resolver=PublicResolver(), use_dns_cache=False, force_close=True, limit=connections
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def fetch(self, url: str, kind: str, take: Callable[[int], object]) -> bytes:
        """Return the file at an http or https URL.

        Args:
            kind: kind of the file, a key of `MEDIA`.
            take: called with the size of each received chunk to reserve memory. `fetch` propagates its errors.

        Raises:
            InvalidPayload: the rules do not allow the URL, or it could not be fetched. The message is meant to follow
                the field name.
        """
        seconds = self._rules.files[kind].seconds
        try:
            return await wait_for(self._follow(_read_url(url), kind, take), seconds)
        except asyncio.TimeoutError:
            limit = f"{seconds:g} s (option.{kind}_fetch_timeout)"
            raise InvalidPayload(f"it could not be fetched within {limit}") from None
        except aiohttp.InvalidURL:
            raise InvalidPayload(_INVALID) from None
        except aiohttp.ClientConnectorCertificateError:
            raise InvalidPayload("it could not be fetched: its server's certificate is not trusted") from None
        except aiohttp.ClientConnectorError:
            raise InvalidPayload("it could not be fetched: its server cannot be reached") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise InvalidPayload(
                "it could not be fetched: its server closed the connection, or does not speak HTTP"
            ) from None

    async def close(self) -> None:
        await self._session.close()

    async def _follow(self, url: URL, kind: str, take: Callable[[int], object]) -> bytes:
        """Fetch a URL, following redirects on the same host."""
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url, kind)
            headers = {"Accept": f"{kind}/*"}
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(response, kind, take)
                target = url.join(_read_url(response.headers.get("Location", "")))
            if target.raw_host != url.raw_host or (url.scheme == "https" and target.scheme != "https"):
                raise InvalidPayload("its server redirects to another host, or away from HTTPS")
            url = target
        raise InvalidPayload(f"its server redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: URL, kind: str) -> None:
        host = url.raw_host or ""
        if url.scheme not in _SCHEMES or not host:
            raise InvalidPayload("it must be an http, https, file or data URL")
        if url.raw_user is not None or url.raw_password is not None:
            raise InvalidPayload("the URL must not contain a user or a password")
        if not self._rules.domains:
            raise InvalidPayload(
                f"{MEDIA[kind]} are not fetched: option.allowed_media_domains is not set; send a data URL"
            )
        name = f"[{host}]" if ":" in host else host
        authorities = [f"{name}:{url.port}"] + ([name, ANY_HOST] if url.is_default_port() else [])
        if not any(name in self._rules.domains for name in authorities):
            raise InvalidPayload("its host is not in option.allowed_media_domains")
        if ":" in host or is_digits(host.replace(".", "")):  # aiohttp does not resolve IP addresses
            try:
                check_address(host)
            except ValueError:  # for example 127.1, which the system resolves for older versions of aiohttp
                raise InvalidPayload(_INVALID) from None

    async def _read(self, response: aiohttp.ClientResponse, kind: str, take: Callable[[int], object]) -> bytes:
        if response.status != 200:
            raise InvalidPayload(f"its server responds with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidPayload("its server sends a Content-Encoding, which is not accepted")
        _check_size(response.content_length or 0, self._rules, kind)
        chunks, size = [], 0
        async for chunk in response.content.iter_chunked(_CHUNK):
            size += len(chunk)
            _check_size(size, self._rules, kind)
            take(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)


def read_file(url: str, kind: str, rules: MediaRules) -> bytes:
    """Return the contents of the file at a `file:` URL. May block.

    Args:
        kind: kind of the file, a key of `MEDIA`.

    Raises:
        InvalidPayload: the file is outside of the allowed directory, or cannot be read. The message is meant to follow
            the field name.
    """
    if rules.directory is None:
        raise InvalidPayload("file URLs are not allowed: option.allowed_local_media_path is not set")
    read = _read_url(url)
    outside = InvalidPayload("it is not a file below option.allowed_local_media_path")
    if read.raw_host not in (None, "", "localhost"):
        raise outside
    try:
        path = Path(read.path).resolve()
        if rules.directory not in path.parents:
            raise outside
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # a directory may have been replaced by a link
            if rules.directory not in opened.parents or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise outside
            data = file.read(rules.files[kind].max_bytes + 1)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: circular links, before Python 3.13
        raise outside from None
    _check_size(len(data), rules, kind)
    return data


def _read_url(text: str) -> URL:
    try:
        return URL(text)
    except (ValueError, TypeError):
        raise InvalidPayload(_INVALID) from None


def _check_size(size: int, rules: MediaRules, kind: str) -> None:
    if size > (most := rules.files[kind].max_bytes):
        raise InvalidPayload(f"the file has more than {most} bytes (option.max_{kind}_bytes)")
