"""Fetches of media: which URLs are allowed, which files are read, and where redirects may lead."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from yarl import URL

from handler.core.errors import InvalidPayload, Overloaded
from handler.serving.media import fetch
from handler.serving.media.decoder import FileRules
from handler.serving.media.fetch import Fetcher, read_file
from handler.serving.media.loader import MediaRules
from tests.one_test import in_one_test

BELOW = "it is not a file below option.allowed_local_media_path"


def rules(*domains: str, directory: Path | None = None, most: int = 10, seconds: float = 60) -> MediaRules:
    return MediaRules({"image": FileRules(most, 100, seconds)}, domains, directory)


# -- files -------------------------------------------------------------------------------------------------------


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "below").mkdir(parents=True)
    (home / "below" / "a b.png").write_bytes(b"x" * 10)
    (home / "large").write_bytes(b"x" * 11)
    (home / "empty").touch()
    (tmp_path / "secret").touch()
    (home / "link").symlink_to(tmp_path / "secret")
    known = rules(directory=home)
    for url in (f"file://{home}/below/a%20b.png", f"file://localhost{home}/below/../below/a b.png"):
        assert read_file(url, "image", known) == b"x" * 10
    assert read_file(f"file://{home}/empty", "image", known) == b""
    with pytest.raises(InvalidPayload, match=r"^the file has more than 10 bytes \(option\.max_image_bytes\)$"):
        read_file(f"file://{home}/large", "image", known)
    for url in (f"file://{home}/link", f"file://{home}/below", f"file://{home}", f"file://{home}/none",
                f"file://{home}/../secret", f"file://other{home}/empty", f"file://{home}/a%00"):  # fmt: skip
        with pytest.raises(InvalidPayload) as raised:
            read_file(url, "image", known)
        assert raised.value.message == BELOW
    with pytest.raises(InvalidPayload, match=r"^file URLs are not allowed: option\.allowed_local_media_path"):
        read_file(f"file://{home}/empty", "image", rules())


def test_a_directory_that_becomes_a_link_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "below").mkdir(parents=True)
    (home / "below" / "a").write_bytes(b"own")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_bytes(b"secret")
    resolve = Path.resolve

    def replaced(path: Path, *given: Any) -> Path:
        found = resolve(path, *given)
        (home / "below").rename(home / "moved")
        (home / "below").symlink_to(tmp_path / "other")
        return found

    monkeypatch.setattr(Path, "resolve", replaced)
    with pytest.raises(InvalidPayload, match=f"^{BELOW}$"):
        read_file(f"file://{home}/below/a", "image", rules(directory=home))


# -- URLs --------------------------------------------------------------------------------------------------------


class Response:
    """A response of a server."""

    def __init__(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.status, self.headers = status, {name.replace("_", "-"): text for name, text in headers.items()}
        self.content_length = int(headers["Content_Length"]) if "Content_Length" in headers else None
        self.content = SimpleNamespace(iter_chunked=lambda size: self._pieces(body))

    async def _pieces(self, body: bytes) -> Any:
        for start in range(0, len(body), 4):
            yield body[start : start + 4]

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *error: object) -> None: ...


class Web(Fetcher):
    """Answers by URL; each address is public."""

    def __init__(self, known: MediaRules, answers: dict[str, Any]) -> None:
        super().__init__(known, 1)
        self.asked: list[str] = []
        self.taken: list[int] = []
        own: Any = self
        own._real, own._session = self._session, SimpleNamespace(get=self._get)
        self._answers = answers

    def _get(self, url: URL, *, headers: dict[str, str], allow_redirects: bool) -> Any:
        assert (headers, allow_redirects) == ({"Accept": "image/*"}, False)
        self.asked.append(str(url))
        answer = self._answers[str(url)]
        if isinstance(answer, Exception):
            raise answer
        return answer


def fetched(url: str, known: MediaRules, answers: dict[str, Any], take: Callable[[int], object] | None = None) -> Web:
    """Fetch a URL; `taken` are the sizes of what has arrived."""

    async def main() -> Web:
        web = Web(known, answers)
        try:
            web.body = await web.fetch(url, "image", take or web.taken.append)  # type: ignore[attr-defined]
        finally:
            real: Any = web
            await real._real.close()
        return web

    return asyncio.run(main())


def refusal(url: str, known: MediaRules, answers: dict[str, Any] | None = None) -> str:
    with pytest.raises(InvalidPayload) as raised:
        fetched(url, known, answers or {})
    return raised.value.message


def test_no_request_has_a_cookie_of_an_earlier_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1; Path=/\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1")
        host = f"localhost:{server.sockets[0].getsockname()[1]}"  # an address would get no cookies anyway
        fetcher = Fetcher(rules(host), 2)
        async with server:
            for name in ("a", "b"):
                assert await fetcher.fetch(f"http://{host}/{name}.png", "image", lambda size: None) == b"x"
            await fetcher.close()

    asyncio.run(main())
    assert [b"\r\ncookie:" in head.lower() for head in heads] == [False, False]


def test_a_file_arrives_in_pieces_within_its_limit() -> None:
    url = "http://a.example/x.png"
    web = fetched(url, rules("*"), {url: Response(body=b"0123456789")})
    assert (web.body, web.taken) == (b"0123456789", [4, 4, 2])  # type: ignore[attr-defined]
    too_long = "the file has more than 10 bytes (option.max_image_bytes)"
    assert refusal(url, rules("*"), {url: Response(body=b"x" * 11)}) == too_long
    assert refusal(url, rules("*"), {url: Response(Content_Length="11")}) == too_long
    fetched(url, rules("*"), {url: Response(Content_Length="10")})
    assert refusal(url, rules("*"), {url: Response(404)}) == "its server responds with status 404"
    assert refusal(url, rules("*"), {url: Response(Content_Encoding="gzip")}) == (
        "its server sends a Content-Encoding, which is not accepted"
    )
    fetched(url, rules("*"), {url: Response(Content_Encoding="Identity")})

    def full(size: int) -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        fetched(url, rules("*"), {url: Response(body=b"x")}, full)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_on_one_host_are_followed(status: int) -> None:
    url = "http://a.example/0"
    steps = {f"http://a.example/{at}": Response(status, Location=f"/{at + 1}") for at in range(3)}
    web = fetched(url, rules("*"), {**steps, "http://a.example/3": Response(body=b"x")})
    assert (web.body, len(web.asked)) == (b"x", 4)  # type: ignore[attr-defined]
    more = {**steps, "http://a.example/3": Response(status, Location="/4")}
    assert refusal(url, rules("*"), more) == "its server redirects more than 3 times"


def test_a_redirect_may_not_leave_its_host_or_https() -> None:
    away = "its server redirects to another host, or away from HTTPS"
    for url, to, words in (
        ("http://a.example/", "http://b.example/", away),
        ("https://a.example/", "http://a.example/", away),
        ("http://a.example/", "http://a.example:81/", "its host is not in option.allowed_media_domains"),
        ("http://a.example/", "file:///a.example/", away),
    ):
        assert refusal(url, rules("*"), {url: Response(302, Location=to)}) == words
    url = "http://a.example/"
    upwards = {url: Response(302, Location="https://a.example/"), "https://a.example/": Response(body=b"x")}
    assert fetched(url, rules("*"), upwards).asked == [url, "https://a.example/"]


@in_one_test(
    ("url", "domains", "words"),
    [
        ("ftp://a.example/", "*", "it must be an http, https, file or data URL"),
        ("http:///x", "*", "it must be an http, https, file or data URL"),
        ("http://u@a.example/", "*", "the URL must not contain a user or a password"),
        ("http://:p@a.example/", "*", "the URL must not contain a user or a password"),
        ("http://a.example:81/", "*", "its host is not in option.allowed_media_domains"),
        ("http://b.example/", "a.example", "its host is not in option.allowed_media_domains"),
        ("http://a.example:81/", "a.example", "its host is not in option.allowed_media_domains"),
        ("http://10.0.0.1/", "*", "its host has an address that is not public"),
        ("http://[::1]/", "[::1]", "its host has an address that is not public"),
        ("http://127.1/", "*", "it is not a valid URL"),
        ("http://[::1/", "*", "it is not a valid URL"),
    ],
)
def test_a_url_is_allowed_by_its_scheme_host_and_port(url: str, domains: str, words: str) -> None:
    assert refusal(url, rules(domains)) == words


def test_hosts_are_named_with_or_without_their_port() -> None:
    for url, domain in (
        ("http://a.example/", "a.example"), ("https://a.example/", "a.example"), ("http://a.example/", "a.example:80"),
        ("http://a.example:81/", "a.example:81"), ("http://8.8.8.8/", "*"),
        ("http://[2606:2800::1]/", "[2606:2800::1]"),
    ):  # fmt: skip
        assert fetched(url, rules(domain), {url: Response(body=b"x")}).asked == [url]
    assert refusal("http://a.example/", rules()) == (
        "images are not fetched: option.allowed_media_domains is not set; send a data URL"
    )


def errors() -> Iterator[tuple[Exception, str]]:
    key: Any = SimpleNamespace(host="a", port=1, ssl=None, is_ssl=True)
    yield asyncio.TimeoutError(), "it could not be fetched within 60 s (option.image_fetch_timeout)"
    yield aiohttp.InvalidURL("x"), "it is not a valid URL"
    certificate = aiohttp.ClientConnectorCertificateError(key, ssl.SSLCertVerificationError("no"))
    yield certificate, "it could not be fetched: its server's certificate is not trusted"
    yield aiohttp.ClientConnectorError(key, OSError("no")), "it could not be fetched: its server cannot be reached"
    for broken in (aiohttp.ClientPayloadError(), OSError(), ValueError()):
        yield broken, "it could not be fetched: its server closed the connection, or does not speak HTTP"


def test_what_fails_is_told_in_words_of_its_own() -> None:
    url = "http://a.example/"
    assert [refusal(url, rules("*"), {url: error}) for error, _ in errors()] == [words for _, words in errors()]


def test_a_name_with_an_address_that_is_not_public_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("93.184.216.34", 80))]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *given: found)  # type: ignore[attr-defined]
    (one,) = asyncio.run(fetch.PublicResolver().resolve("a.example", 80))
    assert (one["hostname"], one["host"], one["port"], one["proto"]) == ("a.example", "93.184.216.34", 80, 6)
    found.append((2, 1, 6, "", ("10.0.0.1", 80)))
    with pytest.raises(InvalidPayload, match=r"^its host has an address that is not public$"):
        asyncio.run(fetch.PublicResolver().resolve("a.example", 80))
