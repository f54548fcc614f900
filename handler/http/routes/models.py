"""The list of models at /v1/models, as OpenAI and as Anthropic have it: the served model, and its LoRA adapters."""

from __future__ import annotations

from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import ModelNotFound, ServingError
from handler.http.asgi import Endpoint, send_answer, send_json
from handler.protocols.anthropic import models as anthropic
from handler.protocols.anthropic.errors import ERRORS as ANTHROPIC_ERRORS
from handler.protocols.kernel.readers.media import taken_media
from handler.protocols.lmi.asynchronous import served_name
from handler.protocols.openai.answers import OpenAiModel, OpenAiModels
from handler.protocols.openai.errors import ERRORS
from handler.serving.model import ServedModel


class ModelRoutes:
    """Ids may have slashes in them. Anthropic's clients, which its header tells, get Anthropic's objects."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.routes = [
            Route("/v1/models", Endpoint({"GET": self._list}, errors=ERRORS)),
            Route("/v1/models/{id:path}", Endpoint({"GET": self._one}, errors=ERRORS)),
        ]

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_anthropic(scope):
            value: OpenAiModels = {"object": "list", "data": [self._describe(*one) for one in self._ids().items()]}
            return await send_json(scope, send, 200, value)
        models = [anthropic.model(id, self._model.started_at, self._max_tokens) for id in self._ids()]
        try:
            page = anthropic.page(models, QueryParams(scope["query_string"]))
        except ServingError as error:
            return await send_answer(scope, send, ANTHROPIC_ERRORS.whole(error))
        return await send_json(scope, send, 200, page)

    async def _one(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = scope["path_params"]["id"]
        ids = self._ids()
        if id not in ids:
            errors = ANTHROPIC_ERRORS if _is_anthropic(scope) else ERRORS
            return await send_answer(scope, send, errors.whole(ModelNotFound(id, served=ids)))
        if _is_anthropic(scope):
            return await send_json(scope, send, 200, anthropic.model(id, self._model.started_at, self._max_tokens))
        return await send_json(scope, send, 200, self._describe(id, ids[id]))

    def _ids(self) -> dict[str, str | None]:
        """Return the names of the model and its adapters, each adapter with the model that it was made for."""
        config = self._model.config
        own = [*(name for name in config.served_model_name or () if name != "*"), config.model_name]
        if config.async_schema:
            own.append(served_name(config))
        adapters = [entry.adapter.name for entry in self._model.adapters.registry]
        return {**dict.fromkeys(own), **dict.fromkeys(adapters, config.model_name)}

    @property
    def _max_tokens(self) -> int | None:
        return self._model.info.max_total_tokens if self._model.info else None

    def _describe(self, id: str, parent: str | None) -> OpenAiModel:
        """TGI and vLLM have `owned_by` as free text."""
        model = self._model
        return {
            "id": id,
            "object": "model",
            "created": int(model.started_at),
            "owned_by": "lmi-handler",
            "root": id if parent else model.context.source or model.config.model_name,
            "parent": parent,
            "max_model_len": self._max_tokens,
            "input_modalities": ["text", *taken_media(model.context)],
        }


def _is_anthropic(scope: Scope) -> bool:
    return anthropic.VERSION_HEADER in scope["headers_by_name"]
