"""Requests of SageMaker's batch transform: each is a line of a file, and so is its answer.

A job fails, and writes nothing of a file, where one of its requests fails. So a refusal is an answer too, with status
200: the error stands at its line's place, and the other lines keep theirs.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from handler.core.errors import (
    BadRequest,
    FormatterFailed,
    InvalidParameter,
    InvalidPayload,
    NotFound,
    TooLarge,
    TooLong,
    UnsupportedMedia,
)
from handler.http.asgi import encoded, send_answer
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.http.routes.inference import Inference
from handler.serving.preprocess import ignored_header

_OF_THE_LINE = (
    BadRequest, FormatterFailed, InvalidParameter, InvalidPayload, NotFound, TooLarge, TooLong, UnsupportedMedia,
)  # fmt: skip
"""What is wrong with a line, however often it is sent. Other failures keep their status: SageMaker tries again."""

_STREAM = "'stream': batch transform has one line for each answer; leave it out, and output_formatter too"


class Records(Inference):
    """An ASGI application in the place of `Inference`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: AnyExchange = scope["extensions"][EXCHANGE]
        exchange.send_whole()
        with self._open(scope, exchange) as task:
            await self._parse(scope, receive, task)
            if task.parsed is None and task.error is None:
                return  # the client has gone
            if task.parsed is not None and task.parsed.streams:
                task.refuse(InvalidPayload(_STREAM))
            task.start()
            while not task.finished:
                if exchange.is_over:
                    return
                await exchange.wait()
            answer = task.take_whole()
            if isinstance(task.error, _OF_THE_LINE):
                answer = answer._replace(status=200)
            # Line breaks within are JSON's white space; in LMI's async mode the answer ends in one.
            answer = answer._replace(body=answer.body.rstrip().replace(b"\n", b" "))
            await send_answer(scope, send, answer, encoded(ignored_header(task.ignored).items()))
