"""The dialects by name. README.md beside this file says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload, ServingError
from handler.protocols.base import HttpResponse, ParsedRequest, Schema, ServerContext
from handler.protocols.lmi.chat import Chat
from handler.protocols.lmi.dynamic_batch import DynamicBatch
from handler.protocols.lmi.request import Lmi
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.completions import OpenAiCompletions
from handler.protocols.tgi.compat import TgiCompat
from handler.protocols.tgi.mindie import Mindie
from handler.protocols.tgi.native import Tgi
from handler.protocols.triton.request import Route, Triton


class DispatchByField:
    """A body with `inputs` is the mode's own; of the others the first dialect whose field it has reads it.

    Null is absent.

    Args:
        mode: the dialect of this configuration, which also answers what no dialect can read.
        others: the field by which a dialect is known -> the dialect.
    """

    def __init__(self, mode: Schema, others: Mapping[str, Schema]) -> None:
        self.name = mode.name
        self.any_media = mode.any_media
        self._mode = mode
        self._others = others

    @property
    def dialects(self) -> tuple[Schema, ...]:
        """All that it chooses from, the mode first."""
        return self._mode, *self._others.values()

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        return self._dialect(body).parse(body, context)

    def _dialect(self, body: Any) -> Schema:
        if isinstance(body, dict) and body.get("inputs") is None:
            for field, dialect in self._others.items():
                if body.get(field) is not None:
                    return dialect
        return self._mode

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        return self._dialect(body).refused(error, body, context)


class RefusingDialect:
    """A dialect that a mode does not have: refused by name, in the mode's own form."""

    def __init__(self, mode: Schema, why: str) -> None:
        self.name = f"no_{mode.name}"
        self.any_media = mode.any_media
        self._mode = mode
        self._why = why

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        raise InvalidPayload(self._why)

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        return self._mode.refused(error, body, context)


TRITON_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
"""Where Triton has a model."""

_LMI, _TGI, _BATCH = Lmi(), TgiCompat(), DynamicBatch()
_COMPLETIONS, _TRITON = OpenAiCompletions(), Triton(Route.SHAPE)
_NO_CHAT = "'messages': chat completions are not available for dynamic batching; they need rolling batch"
_NO_COMPLETIONS = "'prompt': completions are not available for dynamic batching; they need rolling batch"
_NO_TRITON = "'text_input': Triton's generate is not available for dynamic batching; it needs rolling batch"

SCHEMAS: dict[str, Schema] = {
    schema.name: schema
    for schema in (
        DispatchByField(_LMI, {"messages": Chat(_LMI), "prompt": _COMPLETIONS, "text_input": _TRITON}),
        DispatchByField(_TGI, {"messages": Chat(_TGI), "prompt": _COMPLETIONS, "text_input": _TRITON}),
        DispatchByField(
            _BATCH,
            {
                "messages": RefusingDialect(_BATCH, _NO_CHAT),
                "prompt": RefusingDialect(_BATCH, _NO_COMPLETIONS),
                "text_input": RefusingDialect(_BATCH, _NO_TRITON),
            },
        ),
    )
}


ROOTS: dict[str, Schema] = {"tgi": Tgi("tgi", array=True, full_text=True), "mindie": Mindie()}
"""The dialects of `/`, by `option.root_schema`."""

ROUTES: dict[str, Schema] = {
    "/generate": Tgi("tgi_generate", streams=False),
    "/generate_stream": Tgi("tgi_generate_stream", streams=True),
    "/v1/chat/completions": OpenAiChat(),
    "/v1/completions": _COMPLETIONS,
    **{f"{model}/{route.value}": Triton(route) for model in TRITON_MODEL for route in (Route.GENERATE, Route.STREAM)},
}
"""The embedded server's other routes for inference, each with its dialect; `{model}` and `{version}` are checked."""


def routes(root_schema: str) -> dict[str, Schema]:
    """ROUTES, and `/`."""
    return {"/": ROOTS[root_schema], **ROUTES}


def choose(*, rolling_batch: str, tgi_compat: bool) -> Schema:
    """The dialect of /invocations, chosen once; nothing below asks again."""
    if rolling_batch == "disable":
        return SCHEMAS["dynamic_batch"]
    return SCHEMAS["tgi_compat" if tgi_compat else "lmi"]
