"""TGI's other routes: /info, /health, /tokenize and /chat_tokenize, as text-generation-inference's router has them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler import __version__
from handler.core.values import Task
from handler.http.asgi import Endpoint, send_answer, send_json
from handler.http.routes.inference import Inference
from handler.protocols.kernel.http_response import HttpResponse
from handler.protocols.kernel.texts import MAX_TEXTS
from handler.protocols.openai.completions import MAX_PROMPTS
from handler.protocols.registry import TOKENIZING
from handler.protocols.tgi.answers import TgiInfo
from handler.protocols.tgi.errors import UNHEALTHY
from handler.protocols.tgi.request import MAX_BEST_OF, MAX_STOPS
from handler.protocols.tgi.tokenize import CHAT_TOKENIZE, TOKENIZE
from handler.serving.admission import TOKENIZER_THREADS
from handler.serving.model import ServedModel


class TgiRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/info", self._endpoint("GET", self._info)),
            Route("/health", self._endpoint("GET", self._health)),
            Route("/tokenize", self._endpoint("POST", Inference(self._model, TOKENIZING))),
            Route("/chat_tokenize", self._endpoint("POST", Inference(self._model, CHAT_TOKENIZE))),
        ]

    def _endpoint(self, method: str, handle: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Endpoint:
        return Endpoint({method: handle}, errors=TOKENIZE.errors)

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
        value: TgiInfo = {
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
            "default_sampling_params": self._model.context.generation.shown,
        }
        await send_json(scope, send, 200, value)
