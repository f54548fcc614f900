"""OpenAI's list of models at /v1/models: the served model, and the LoRA adapters that requests may name."""

from __future__ import annotations

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import ModelNotFound
from handler.http.asgi import Endpoint, send_answer, send_json
from handler.protocols.openai.answers import OpenAiModel, OpenAiModels
from handler.protocols.openai.errors import ERRORS
from handler.serving.model import ServedModel


class OpenAiRoutes:
    """Ids may have slashes in them."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.routes = [
            Route("/v1/models", Endpoint({"GET": self._list}, errors=ERRORS)),
            Route("/v1/models/{id:path}", Endpoint({"GET": self._one}, errors=ERRORS)),
        ]

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        value: OpenAiModels = {"object": "list", "data": list(self._models().values())}
        await send_json(scope, send, 200, value)

    async def _one(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = scope["path_params"]["id"]
        model = self._models().get(id)
        if model is None:
            return await send_answer(scope, send, ERRORS.whole(ModelNotFound(id[:200])))
        return await send_json(scope, send, 200, model)

    def _models(self) -> dict[str, OpenAiModel]:
        """By id. `parent` is what an adapter was made for; TGI and vLLM have `owned_by` as free text."""
        model, config = self._model, self._model.config
        most = model.info.max_total_tokens if model.info else None
        created = int(model.started_at)

        def describe(id: str, root: str, parent: str | None = None) -> OpenAiModel:
            return {
                "id": id,
                "object": "model",
                "created": created,
                "owned_by": "lmi-handler",
                "root": root,
                "parent": parent,
                "max_model_len": most,
            }

        own = [config.model_name, *(name for name in config.served_model_name or () if name != "*")]
        adapters = [entry.adapter.name for entry in model.adapters.registry]
        by_name = {name: describe(name, name, config.model_name) for name in adapters}
        return {**{name: describe(name, config.model_name) for name in own}, **by_name}
