"""A stateful session with the container: requests that carry its id reach the same copy."""

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
    """One session; made by `Predictor.session()`, closed by the `with` statement.

    Contract sagemaker.md, section 1.1: opened and closed by bodies of their own, otherwise a header.

    Attributes:
        id: the container's name for it.
        expires: when the container forgets it; None where it did not say.

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
        """As `Predictor.predict`; a session that is unknown or has expired is `ModelRefused` (400)."""
        return self._predictor.predict(data, session_id=self.id, **options)

    def predict_stream(self, data: Any, **options: Any) -> Stream:
        return self._predictor.predict_stream(data, session_id=self.id, **options)

    def close(self) -> None:
        """The container forgets it. Closed already: nothing happens."""
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
            if error is None:  # else the first error is the one to be seen
                raise

    def _send(self, what: str, name: str) -> dict[str, Any]:
        return self._predictor.runtime.invoke(
            {"Body": json.dumps({"requestType": what}).encode(), "ContentType": "application/json", "SessionId": name}
        )


def _expiry(text: str) -> datetime.datetime | None:
    """Of `Expires=2026-11-20T00:00:00Z`."""
    name, _, value = text.strip().partition("=")
    if name.lower() != "expires":
        return None
    return datetime.datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
