"""The dialects by name. README.md beside this file says how to add one."""

from __future__ import annotations

from handler.schemas.base import Schema
from handler.schemas.batch import DynamicBatch
from handler.schemas.by_shape import ByShape, Refusing
from handler.schemas.chat import Chat
from handler.schemas.lmi import Lmi
from handler.schemas.tgi import TgiCompat
from handler.schemas.triton import Route, Triton

TRITON_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
"""Where Triton has a model."""

_LMI, _TGI, _BATCH = Lmi(), TgiCompat(), DynamicBatch()
_TRITON = Triton(Route.SHAPE)
_NO_CHAT = "'messages': chat completions are not available for dynamic batching; they need rolling batch"
_NO_TRITON = "'text_input': Triton's generate is not available for dynamic batching; it needs rolling batch"

SCHEMAS: dict[str, Schema] = {
    schema.name: schema
    for schema in (
        # By shape, "prompt" will be OpenAI's completions: in the first two, and Refusing in the third.
        ByShape(_LMI, {"messages": Chat(_LMI), "text_input": _TRITON}),
        ByShape(_TGI, {"messages": Chat(_TGI), "text_input": _TRITON}),
        ByShape(_BATCH, {"messages": Refusing(_BATCH, _NO_CHAT), "text_input": Refusing(_BATCH, _NO_TRITON)}),
    )
}


ROUTES: dict[str, Schema] = {
    **{f"{model}/{route.value}": Triton(route) for model in TRITON_MODEL for route in (Route.GENERATE, Route.STREAM)},
}
"""The embedded server's other routes for inference, each with its dialect; `{model}` and `{version}` are checked."""


def choose(*, rolling_batch: str, tgi_compat: bool) -> Schema:
    """The dialect of /invocations, chosen once; nothing below asks again."""
    if rolling_batch == "disable":
        return SCHEMAS["dynamic_batch"]
    return SCHEMAS["tgi_compat" if tgi_compat else "lmi"]
