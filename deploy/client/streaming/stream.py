"""A streamed answer, while it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from deploy.client.aws.failures import FROM_AWS, failure
from deploy.client.streaming.answer import AnswerReader
from deploy.client.streaming.events import Event, Finish, Token


class Stream:
    """The events of an answer as they arrive. Iterate once, on one thread.

    Leaving it early (`close`, or the `with` statement) closes the connection, which ends the generation if the
    container notices.

    Args:
        parts: the bytes.
        close: closes the connection.

    Attributes:
        content_type: the container's.
        variant: the endpoint's variant that answers.
    """

    def __init__(self, parts: Iterable[bytes], content_type: str, close: Callable[[], Any], variant: str = "") -> None:
        self._parts = parts
        self._close = close
        self._reader = AnswerReader(content_type)
        self._events = self._read()
        self.content_type = content_type
        self.variant = variant

    def __iter__(self) -> Iterator[Event]:
        """Yield the events. Raises RequestFailed, with the events before it."""
        return self._events

    def text(self, index: int = 0) -> Iterator[str]:
        """Yield the pieces of the answer's text as they arrive; the whole text of an answer that is not streamed.

        Args:
            index: number of the answer, if several were requested.
        """
        pieces = False
        for event in self._events:
            if isinstance(event, Token) and event.index == index:
                pieces = True
                if event.shown and event.text:
                    yield event.text
            elif isinstance(event, Finish) and event.index == index and not pieces and event.generated_text:
                yield event.generated_text

    def bytes(self) -> Iterator[bytes]:
        """Yield the bytes as they arrive, in place of events.

        Raises:
            RequestFailed: the connection failed. A failure of the model is part of the bytes.
        """
        try:
            yield from self._parts
        except FROM_AWS as error:
            raise failure(error) from error
        finally:
            self.close()

    @property
    def arrived(self) -> tuple[Event, ...]:
        """The events so far."""
        return tuple(self._reader.arrived)

    @property
    def finish(self) -> Finish | None:
        """The end of the (first) answer; None: it has not arrived."""
        return next((event for event in self._reader.arrived if isinstance(event, Finish)), None)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Iterator[Event]:
        try:
            for part in self._parts:
                yield from self._reader.feed(part)
            yield from self._reader.finish()
        except FROM_AWS as error:
            raise self._reader.with_arrived(failure(error)) from error
        finally:
            self.close()


def stream_of(response: dict[str, Any]) -> Stream:
    """Return the stream of an answer of InvokeEndpointWithResponseStream."""
    body = response["Body"]
    parts = (event["PayloadPart"]["Bytes"] for event in body if "PayloadPart" in event)
    return Stream(parts, response.get("ContentType", ""), body.close, response.get("InvokedProductionVariant", ""))
