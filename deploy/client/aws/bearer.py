"""Bearer tokens for an endpoint's OpenAI route.

A token is `sagemaker-api-key-` and the base64 of a presigned `CallWithBearerToken` (as sagemaker-core's token generator
creates it). It is created on this machine and lives at most 12 hours, and no longer than the credentials. It opens all
endpoints that they open, so it must not be logged. It needs sagemaker:CallWithBearerToken on `*`.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from typing import Any

from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest

from deploy.client.errors import Forbidden, NotSent
from deploy.credentials import SIGN_IN

PREFIX = "sagemaker-api-key-"
LONGEST = 12 * 3600
_AHEAD = 300  # seconds before its end (at most half its lifetime) at which a token is replaced


def bearer_token(credentials: Any, region: str, seconds: int = LONGEST) -> str:
    """Create one token.

    Args:
        credentials: botocore's frozen credentials.
        seconds: lifetime, 1 to 43200.

    Raises:
        NotSent: the lifetime is invalid.
    """
    if not 1 <= seconds <= LONGEST:
        raise NotSent(f"a bearer token lives 1 to {LONGEST} s, not {seconds}")
    request = AWSRequest(
        "POST",
        "https://sagemaker.amazonaws.com/",
        headers={"Host": "sagemaker.amazonaws.com"},
        params={"Action": "CallWithBearerToken"},
    )
    SigV4QueryAuth(credentials, "sagemaker", region, expires=seconds).add_auth(request)
    signed = request.url.removeprefix("https://") + "&Version=1"
    return PREFIX + base64.b64encode(signed.encode()).decode()


class BearerToken:
    """A source of valid tokens: a call returns the current one, or a new one. Thread-safe.

    Args:
        session: boto3's session; its credentials are read at each call, as they may be temporary.
    """

    def __init__(
        self, session: Any, region: str, seconds: int = LONGEST, clock: Callable[[], float] = time.time
    ) -> None:
        self._session = session
        self._region = region
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._token = ""
        self._until = 0.0
        self._key: tuple[Any, ...] = ()

    def __call__(self) -> str:
        """Return a valid token. Raises Forbidden if there are no credentials."""
        credentials = self._session.get_credentials()
        if credentials is None:
            raise Forbidden("no AWS credentials were found", SIGN_IN)
        frozen = credentials.get_frozen_credentials()
        key = (frozen.access_key, frozen.secret_key, frozen.token)
        with self._lock:
            if key != self._key or self._clock() >= self._until:
                self._token = bearer_token(frozen, self._region, self._seconds)
                self._until = self._clock() + self._seconds - min(_AHEAD, self._seconds / 2)
                self._key = key
            return self._token

    def __repr__(self) -> str:
        return "BearerToken(...)"
