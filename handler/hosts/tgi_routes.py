"""TGI's routes that are no inference: /info, /health, /tokenize, /chat_tokenize (contract generate_apis.md, 1.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler import __version__
from handler.engines.base import Tokenizer
from handler.errors import serving_error
from handler.framing import dumps
from handler.hosts.asgi import Endpoint, read_body, send_answer, send_json
from handler.hosts.intake import ignored_header
from handler.hosts.service import TOKENIZER_THREADS, Service
from handler.schemas import ROUTES
from handler.schemas.base import Answer
from handler.schemas.chat import TABLE as CHAT
from handler.schemas.messages import read_messages
from handler.schemas.tgi_errors import Misshapen, Rejected
from handler.schemas.tgi_reading import MAX_BEST_OF, MAX_STOPS
from handler.schemas.tgi_reading import read_body as read_generate
from handler.text import Prompt, spans

_SCHEMA = ROUTES["/generate"]  # whose refusals these are
_NO_EFFECT = {*CHAT.parameters, "stream"}
"""Of a chat, what does not change its prompt."""

Tokenized = Callable[[Tokenizer], bytes]


class TgiRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/info", self._endpoint("GET", self._info)),
            Route("/health", self._endpoint("GET", self._health)),
            Route("/tokenize", self._endpoint("POST", functools.partial(self._tokenize, _of_text))),
            Route("/chat_tokenize", self._endpoint("POST", functools.partial(self._tokenize, _of_chat))),
        ]

    def _endpoint(self, method: str, handle: Callable[[Scope, Receive, Send], Any]) -> Endpoint:
        return Endpoint({method: handle}, refused=_SCHEMA.refused)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service.healthy:
            await send_answer(scope, send, Answer(200, "text/plain; charset=utf-8", b""))
        else:
            await send_json(scope, send, 503, {"error": "unhealthy", "error_type": "healthcheck"})

    async def _info(self, scope: Scope, receive: Receive, send: Send) -> None:
        config, info = self._service.config, self._service.info
        total = None if info is None else info.max_total_tokens
        value = {
            "model_id": config.model_id or config.model_name,
            "model_sha": config.engine_options.get("revision"),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": config.max_rolling_batch_size + config.job_queue_size,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": None if total is None else total - 1,
            "max_total_tokens": total,
            "validation_workers": TOKENIZER_THREADS,
            "max_client_batch_size": 4,
            "router": "lmi-handler",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
        await send_json(scope, send, 200, value)

    async def _tokenize(
        self, read: Callable[[Any], tuple[Tokenized, list[str]]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        service, value = self._service, None
        service.num_requests += 1
        try:
            headers = scope["headers_by_name"]
            service.intake.check_headers(headers, _SCHEMA)
            body = await read_body(scope, receive, service.config.max_request_size, service.config.client_timeout)
            if body is None:
                return
            value = (await service.decode(body, headers, _SCHEMA)).value
            use, ignored = read(value)
            found = Answer(200, "application/json", await service.with_tokenizer(use))
            extra = [(name.encode(), text.encode()) for name, text in ignored_header(ignored).items()]
            await send_answer(scope, send, found, extra)
        except Exception as error:
            await send_answer(scope, send, _SCHEMA.refused(serving_error(error), value))
        finally:
            service.num_requests -= 1


def _of_text(body: Any) -> tuple[Tokenized, list[str]]:
    """Of a generate body only `inputs` counts; as in TGI, `truncate` has no effect."""
    inputs = read_generate(body).inputs
    if not inputs:
        raise Rejected("`inputs` cannot be empty")

    def use(tokenizer: Tokenizer) -> bytes:
        return dumps(_tokens(tokenizer.encode(inputs)))

    return use, []


def _of_chat(body: Any) -> tuple[Tokenized, list[str]]:
    if not isinstance(body, dict) or "messages" not in body:
        raise Misshapen("missing field `messages`")
    if body.get("tools"):
        raise Rejected("`tools` are not laid out by this route")  # they would change the text
    messages, ignored = read_messages(body["messages"])
    ignored += [name for name in body if name not in _NO_EFFECT and name != "messages"]

    def use(tokenizer: Tokenizer) -> bytes:
        prompt = tokenizer.encode_chat(messages)
        return dumps({"tokenize_response": _tokens(prompt), "templated_text": prompt.text})

    return use, ignored


def _tokens(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Each token with its place in the text, in bytes; no text and (0, 0) where there is no such place."""
    data = prompt.text.encode()
    places = spans(prompt) or [(0, 0)] * len(prompt.ids)
    return [
        {"id": id, "text": data[start:stop].decode(), "start": start, "stop": stop}
        for id, (start, stop) in zip(prompt.ids, places, strict=True)
    ]
