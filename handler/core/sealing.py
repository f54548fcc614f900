"""Encrypts values that clients keep and send back, so that only this server can read or write them."""

from __future__ import annotations

import base64
import hashlib
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from handler.core.errors import ConfigError
from handler.core.owners import names_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_VERSION = b"\x01"
_NONCE = 12  # bytes, as NIST SP 800-38D recommends
_MIN_SECRET = 32  # bytes
_MAX_SECRET = 1 << 16
_OPTION = "option.compaction_key_file"
NOT_OPENED = (
    f"cannot be read: it was written by another server, before this server restarted (see {_OPTION}), or for "
    "another API key"
)
"""The reason that clients get if a value cannot be opened."""


class Sealer:
    """Encrypts values with AES-256 in Galois/Counter Mode. Each value belongs to an owner, and cannot be opened for
    another one.

    Args:
        secret: secret of the servers that open each other's values. By default, each object creates one.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = hashlib.blake2b(secret or os.urandom(32), digest_size=32, person=b"lmi.sealing").digest()

    def seal(self, value: bytes, owner: str) -> str:
        """Return a value as encrypted text."""
        nonce = os.urandom(_NONCE)
        return base64.urlsafe_b64encode(_VERSION + nonce + self._cipher.encrypt(nonce, value, owner.encode())).decode()

    def open(self, text: str, owner: str) -> bytes:
        """Return the value in encrypted text.

        Raises:
            ValueError: the text was not written with this secret and for this owner, or has been changed.
        """
        from cryptography.exceptions import InvalidTag

        data = base64.b64decode(text.encode(), b"-_", validate=True)
        nonce, sealed = data[1 : 1 + _NONCE], data[1 + _NONCE :]
        if not data.startswith(_VERSION) or len(nonce) < _NONCE:
            raise ValueError("the text has another format")
        for name in names_of(owner):
            with suppress(InvalidTag):
                return self._cipher.decrypt(nonce, sealed, name.encode())
        raise ValueError("the text was encrypted with another secret or for another owner")

    @cached_property
    def _cipher(self) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)


def read_sealer(path: str | None) -> Sealer:
    """Return the sealer with the secret in a file, or with a new secret if there is no path.

    Raises:
        ConfigError: the file cannot be read, or its secret is too short.
    """
    if path is None:
        return Sealer()
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_MAX_SECRET).strip()
    except OSError as error:
        raise ConfigError(f"{_OPTION}={path}: {error.strerror}") from None
    if len(secret) < _MIN_SECRET:
        advice = "write the output of `openssl rand -hex 32` to it"
        raise ConfigError(f"{_OPTION}={path}: must contain at least {_MIN_SECRET} bytes; {advice}")
    return Sealer(secret)
