"""Stateful sessions: requests with a session's id reach the same copy of the model."""

from __future__ import annotations

import datetime
import json
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deploy.client.errors import ModelFailed, RequestFailed

if TYPE_CHECKING:
    from deploy.client.predictor import Predictor
    from deploy.client.streaming.stream import Stream


class Session:
    """One session, opened by `Predictor.session()` and closed by the `with` statement.

    Special bodies open and close it (`requestType` NEW_SESSION and CLOSE); other requests carry its id in a header.

    Attributes:
        id: the container's id for it.
        expires: when the container forgets it; None: unknown.

    Raises:
        ModelRefused: the container has no sessions.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        response = self._send("NEW_SESSION", "NEW_SESSION")
        name, _, more = str(response.get("NewSessionId") or "").partition(";")
        self.id = name.strip()
        if not self.id:
            raise ModelFailed("the container answered without a session's id", "Are its sessions switched on?")
        self.expires = _expiry(more)

    def predict(self, data: Any, **options: Any) -> Any:
        """As `Predictor.predict`. An unknown or expired session raises `ModelRefused` (400)."""
        return self._predictor.predict(data, session_id=self.id, **options)

    def predict_stream(self, data: Any, **options: Any) -> Stream:
        return self._predictor.predict_stream(data, session_id=self.id, **options)

    def close(self) -> None:
        """Close the session in the container. A second call does nothing."""
        if self.id:
            self._send("CLOSE", self.id)
            self.id = ""

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RequestFailed:
            if error is None:  # otherwise the first error matters
                raise

    def _send(self, what: str, name: str) -> dict[str, Any]:
        return self._predictor.runtime.invoke(
            {"Body": json.dumps({"requestType": what}).encode(), "ContentType": "application/json", "SessionId": name}
        )


def _expiry(text: str) -> datetime.datetime | None:
    """Parse `Expires=2026-11-20T00:00:00Z`."""
    name, _, value = text.strip().partition("=")
    if name.lower() != "expires":
        return None
    return datetime.datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
