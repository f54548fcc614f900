"""The names of owners: of the API keys, or of the clients that a gateway names. What a client stores has its owner."""

from __future__ import annotations

import hashlib


class Everyone(str):
    """The owner "", which all clients of a server without keys are.

    Earlier releases told clients apart by the keys that they sent, even if nobody checked them. What a client stored
    then has the name of its key, under which only the same client finds it.

    Args:
        former: name of the owner of the key in the request.
    """

    former: str

    def __new__(cls, former: str) -> Everyone:
        everyone = super().__new__(cls)
        everyone.former = former
        return everyone


def names_of(owner: str) -> tuple[str, ...]:
    """Return the names under which an owner's values may be stored. New values are stored under the first one."""
    return (owner, owner.former) if isinstance(owner, Everyone) else (owner,)


def owner_by_key(key: str) -> str:
    """Return a name for the owner of an API key."""
    return digest_of(key).hex()


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
