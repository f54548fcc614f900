"""TGI's other routes: /info, /health, /tokenize and /chat_tokenize, as text-generation-inference's router has them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler import __version__
from handler.core.errors import InvalidParameter, Overloaded, serving_error
from handler.core.framing import dumps
from handler.core.text import Prompt, spans
from handler.core.values import Task
from handler.engines.base import Tokenizer
from handler.http.asgi import Endpoint, read_body, send_answer, send_json
from handler.protocols.assistant.template import READERS, read_template
from handler.protocols.assistant.tools.prompt import lay_out
from handler.protocols.base import HttpResponse
from handler.protocols.openai.completions import MAX_PROMPTS
from handler.protocols.openai.parameters import CHAT, HARMLESS
from handler.protocols.readers.messages import read_messages
from handler.protocols.readers.texts import MAX_TEXTS
from handler.protocols.registry import ROUTES
from handler.protocols.tgi.errors import UNHEALTHY, OutOfRange, WrongType
from handler.protocols.tgi.request import MAX_BEST_OF, MAX_STOPS
from handler.protocols.tgi.request import read_body as read_generate
from handler.protocols.validation import show
from handler.serving.admission import TOKENIZER_THREADS
from handler.serving.metrics.request_stats import RequestStats
from handler.serving.model import ServedModel
from handler.serving.preprocess import ignored_header

_SCHEMA = ROUTES["/generate"]  # whose refusals these are
_SHAPING = ("add_special_tokens", "chat_template", *READERS)
"""What changes a chat's prompt, as in OpenAI's chat."""

_NO_EFFECT = HARMLESS | {"model", "stream", "stream_options", "tool_choice", "parallel_tool_calls"}
_NO_EFFECT |= CHAT.parameters.keys() - {*_SHAPING, "truncate_prompt_tokens"}
"""What does not change it."""

MOST_TOKENIZING = 4 * TOKENIZER_THREADS
"""Requests at a time; those for answers need the same threads."""

Tokenized = Callable[[Tokenizer], bytes]


class TgiRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._num_tokenizing = 0

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/info", self._endpoint("GET", self._info)),
            Route("/health", self._endpoint("GET", self._health)),
            Route("/tokenize", self._endpoint("POST", functools.partial(self._tokenize, self._of_text))),
            Route("/chat_tokenize", self._endpoint("POST", functools.partial(self._tokenize, self._of_chat))),
        ]

    def _endpoint(self, method: str, handle: Callable[[Scope, Receive, Send], Any]) -> Endpoint:
        return Endpoint({method: handle}, refused=_SCHEMA.refused)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._model.healthy:
            await send_answer(scope, send, HttpResponse(200, "text/plain; charset=utf-8", b""))
        else:
            await send_json(scope, send, 503, UNHEALTHY)

    async def _info(self, scope: Scope, receive: Receive, send: Send) -> None:
        config, info = self._model.config, self._model.info
        total = None if info is None else info.max_total_tokens
        generates = self._model.context.task is Task.GENERATION  # else all tokens are the text's
        tokens = None if total is None else min(total - generates, config.max_input_len or total)
        value = {
            "model_id": config.model_id or config.model_name,
            "model_sha": config.engine_options.get("revision"),
            "model_pipeline_tag": self._model.context.task.value,
            "max_concurrent_requests": config.max_rolling_batch_size + config.job_queue_size,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": tokens,
            "max_total_tokens": total,
            "validation_workers": TOKENIZER_THREADS,
            "max_client_batch_size": MAX_PROMPTS if generates else MAX_TEXTS,  # of /v1/completions; TGI's take one
            "router": "lmi-handler",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
        await send_json(scope, send, 200, value)

    async def _tokenize(
        self, read: Callable[[Any], tuple[Tokenized, list[str]]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        model, value, id = self._model, None, scope["request_id"]
        stats = RequestStats(id)
        model.num_requests += 1
        try:
            headers = scope["headers_by_name"]
            model.preprocessor.check_headers(headers, _SCHEMA)
            body = await read_body(scope, receive, model.config.max_request_size, model.config.client_timeout)
            if body is None:
                return
            with self._place():
                value = (await model.admission.decode(body, headers, _SCHEMA)).value
                use, ignored = await model.admission.run(len(body), functools.partial(read, value))
                answer = HttpResponse(200, "application/json", await model.admission.with_tokenizer(use))
        except Exception as error:  # a tokenizer is foreign code
            await send_answer(scope, send, model.refused(serving_error(error), _SCHEMA, id=id, body=value).take_whole())
        else:
            stats.close("ok")
            model.metrics.requests.labels("ok").inc()  # the other figures are of answers
            extra = [(name.encode(), text.encode()) for name, text in ignored_header(ignored).items()]
            await send_answer(scope, send, answer, extra)
        finally:
            model.num_requests -= 1

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Raises Overloaded where there is none left."""
        if self._num_tokenizing >= MOST_TOKENIZING:
            raise Overloaded(f"{MOST_TOKENIZING} requests are being tokenized")
        self._num_tokenizing += 1
        try:
            yield
        finally:
            self._num_tokenizing -= 1

    def _of_text(self, body: Any) -> tuple[Tokenized, list[str]]:
        """Of a generate body only `inputs` counts; as in TGI, `truncate` has no effect."""
        inputs = read_generate(body).inputs
        if not inputs:
            raise OutOfRange("`inputs` cannot be empty")

        def use(tokenizer: Tokenizer) -> bytes:
            return dumps(_tokens(tokenizer.encode(inputs)))

        return use, []

    def _of_chat(self, body: Any) -> tuple[Tokenized, list[str]]:
        """A chat as /v1/chat/completions lays it out."""
        if not isinstance(body, dict) or "messages" not in body:
            raise WrongType("missing field `messages`")
        if body.get("tools"):
            raise OutOfRange("`tools` are not laid out by this route")  # they would change the text
        given = {name: value for name, value in body.items() if value is not None and name not in ("messages", "tools")}
        options = {name: _read(name, given.pop(name)) for name in _SHAPING if name in given}
        text_only = replace(self._model.context, no_images="this route lays out text only")
        messages, _, ignored = read_messages(body["messages"], text_only)
        try:
            template, unread = read_template(options, messages, self._model.context)
        except InvalidParameter as error:
            raise OutOfRange(error.message) from None
        ignored += unread
        ignored += [name for name in given if name not in _NO_EFFECT]
        laid, _ = lay_out(messages, (), self._model.context.chat_template)

        def use(tokenizer: Tokenizer) -> bytes:
            prompt = tokenizer.encode_chat(laid, (), template)
            return dumps({"tokenize_response": _tokens(prompt), "templated_text": prompt.text})

        return use, ignored


def _read(name: str, value: Any) -> Any:
    try:
        return CHAT.parameters[name].read(value)
    except ValueError as error:
        raise OutOfRange(f"{name}={show(value)}: {error}") from None


def _tokens(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Each token with its place in the text, in bytes; no text and (0, 0) where there is no such place."""
    data = prompt.text.encode()
    places = spans(prompt) or [(0, 0)] * len(prompt.ids)
    return [
        {"id": id, "text": data[start:stop].decode(), "start": start, "stop": stop}
        for id, (start, stop) in zip(prompt.ids, places, strict=True)
    ]
