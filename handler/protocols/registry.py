"""The dialects by name and by route. README.md says how to add one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handler.core.errors import ServingError
from handler.protocols.anthropic import errors as anthropic_errors
from handler.protocols.anthropic.request import AnthropicCount, AnthropicMessages
from handler.protocols.base import HttpResponse, ParsedRequest, Schema, ServerContext
from handler.protocols.lmi.chat import Chat
from handler.protocols.lmi.dynamic_batch import DynamicBatch
from handler.protocols.lmi.request import Lmi
from handler.protocols.openai import errors as openai_errors
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.completions import OpenAiCompletions
from handler.protocols.responses.request import OpenAiResponses
from handler.protocols.tgi.compat import TgiCompat
from handler.protocols.tgi.mindie import Mindie
from handler.protocols.tgi.native import Tgi
from handler.protocols.triton.request import Route, Triton


class DispatchByField:
    """A route with several dialects. A body with `inputs` is the mode's; otherwise the first known field decides.

    Null means absent.

    Args:
        mode: the dialect of this configuration, which also answers a body that no dialect reads.
        others: field -> the dialect that it selects.
    """

    def __init__(self, mode: Schema, others: Mapping[str, Schema]) -> None:
        self.name = mode.name
        self.any_media = mode.any_media
        self._mode = mode
        self._others = others

    @property
    def dialects(self) -> tuple[Schema, ...]:
        """All dialects of the route, the mode first."""
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


TRITON_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
"""The paths of a model in Triton's protocol."""

_COMPLETIONS, _TRITON = OpenAiCompletions(), Triton(Route.SHAPE)
_MESSAGES, _RESPONSES = AnthropicMessages(), OpenAiResponses()

_MODES: dict[str, Lmi | TgiCompat | DynamicBatch] = {mode.name: mode for mode in (Lmi(), TgiCompat(), DynamicBatch())}


def _by_field(mode: Schema, chat: Schema) -> DispatchByField:
    return DispatchByField(
        mode, {"anthropic_version": _MESSAGES, "messages": chat, "prompt": _COMPLETIONS, "text_input": _TRITON}
    )


SCHEMAS: dict[str, Schema] = {name: _by_field(mode, Chat(mode)) for name, mode in _MODES.items()}
"""Dialects of /invocations by the mode's name, with LMI's chat."""

ROOTS: dict[str, Schema] = {"tgi": Tgi("tgi", array=True, full_text=True), "mindie": Mindie()}
"""`option.root_schema` -> the dialect of `/`."""

ROUTES: dict[str, Schema] = {
    "/generate": Tgi("tgi_generate", streams=False),
    "/generate_stream": Tgi("tgi_generate_stream", streams=True),
    "/v1/chat/completions": OpenAiChat(),
    "/v1/completions": _COMPLETIONS,
    "/v1/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": AnthropicCount(),
    **{f"{model}/{route.value}": Triton(route) for model in TRITON_MODEL for route in (Route.GENERATE, Route.STREAM)},
}
"""The embedded server's other inference routes, each with its dialect. The host checks `{model}` and `{version}`."""


def routes(root_schema: str) -> dict[str, Schema]:
    """Return ROUTES with `/`."""
    return {"/": ROOTS[root_schema], **ROUTES}


def choose(rolling_batch: str, tgi_compat: bool, openai_compat: bool) -> Schema:
    """Choose the dialect of /invocations.

    Args:
        openai_compat: chats are answered as on /v1/chat/completions.
    """
    name = "dynamic_batch" if rolling_batch == "disable" else "tgi_compat" if tgi_compat else "lmi"
    return _by_field(_MODES[name], ROUTES["/v1/chat/completions"]) if openai_compat else SCHEMAS[name]


_FAMILIES = {
    "/v1/messages": anthropic_errors.refused,
    "/v1/complete": anthropic_errors.refused,
    "/v1": openai_errors.refused,
}
"""Where a dialect's paths begin, and how it refuses; the longer ones first."""


def refusing(path: str) -> Callable[[ServingError], HttpResponse] | None:
    """Return how the dialect refuses whose paths begin as this one; None where there is none."""
    families = (refused for family, refused in _FAMILIES.items() if path == family or path.startswith(f"{family}/"))
    return next(families, None)
