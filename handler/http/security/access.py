"""Read who may call the embedded server: keys, browsers' origins, hosts and certificate. All are off by default."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from handler.core.errors import ConfigError

KEYS_VARIABLE = "LMI_API_KEY"
ANY_ORIGIN = ANY_HOST = "*"

_KEY = re.compile(r"[!-+\--~]{1,1024}")  # what fits a header, but for the comma, which parts keys in the environment
_HOST = re.compile(r"\*|[a-z0-9_.-]+|[0-9a-f:.]+")  # a name, or an IPv4 or IPv6 address
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Access:
    """
    Attributes:
        keys: any of which opens the server; none: it is open. They are in no repr.
        origins: of pages that may call it from a browser; `*` is all.
        hosts: by which it may be called beside those of this machine; `*` is any.
        certfile, keyfile: PEM files for HTTPS; None: HTTP.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    certfile: Path | None = None
    keyfile: Path | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.certfile is None else "https"


OPEN = Access()


def read_access(
    keys: Iterable[str] = (),
    origins: Iterable[str] = (),
    certfile: Path | None = None,
    keyfile: Path | None = None,
    *,
    hosts: Iterable[str] = (),
    environ: MutableMapping[str, str],
) -> Access:
    """What the command line and LMI_API_KEY ask for.

    The variable is taken out of `environ`: the processes that are started later, and a model.py, need not know keys.

    Raises:
        ConfigError: naming the option or the file that is wrong, and never a key.
    """
    named = [*keys]
    if any(not _KEY.fullmatch(key) for key in named):
        raise ConfigError("--api-key: a key is 1 to 1024 visible ASCII characters without commas")
    if KEYS_VARIABLE in environ:
        found = [key.strip() for key in environ.pop(KEYS_VARIABLE).split(",")]
        if any(not _KEY.fullmatch(key) for key in found):  # also when it is empty: it was meant to lock something
            raise ConfigError(
                f"environment variable {KEYS_VARIABLE}: must be keys, separated by commas, each of 1 to 1024 visible "
                "ASCII characters; unset it for a server without keys"
            )
        named += found
    if certfile is None and keyfile is not None:
        raise ConfigError("--ssl-keyfile: needs --ssl-certfile")
    if certfile is not None:
        check_certificate(certfile, keyfile)
    return Access(
        keys=tuple(dict.fromkeys(named)),
        origins=frozenset(map(_origin, origins)),
        hosts=frozenset(map(_host, hosts)),
        certfile=certfile,
        keyfile=keyfile,
    )


def _origin(text: str) -> str:
    found = text.strip().lower()
    if found != ANY_ORIGIN and not _ORIGIN.fullmatch(found):
        raise ConfigError(f"--allow-origin {text}: must be * or like https://example.com, with no path")
    return found


def _host(text: str) -> str:
    found = text.strip().lower()
    if found.startswith("[") and found.endswith("]"):
        found = found[1:-1]
    if not _HOST.fullmatch(found):
        raise ConfigError(f"--allow-host {text}: must be * or a host like models.example.com, with no port")
    return found


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """Try the pair before anything is loaded; uvicorn reads it again when it starts.

    Args:
        keyfile: None: the key is in `certfile` too.

    Raises:
        ConfigError: naming the file that is wrong.
    """
    option, key = ("--ssl-certfile", certfile) if keyfile is None else ("--ssl-keyfile", keyfile)
    for name, path in (("--ssl-certfile", certfile), (option, key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certfile)  # reads certificates and nothing else
    except ssl.SSLError:
        raise ConfigError(f"--ssl-certfile {certfile}: holds no certificate in PEM form") from None
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except _Encrypted:
        raise ConfigError(f"{option} {key}: its key is encrypted; give one without a password") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{option} {key}: does not belong to the first certificate in {certfile}") from None
        raise ConfigError(f"{option} {key}: holds no private key in PEM form ({error.reason})") from None


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise _Encrypted
