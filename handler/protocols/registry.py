"""The registry of dialects by name and by route. README.md explains how to add a dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from handler.config.config import Config
from handler.core.errors import InvalidParameter, ModelNotFound, NotFound
from handler.core.values import Task, Truncation
from handler.protocols.anthropic.dialect import AnthropicCountTokens, AnthropicMessages
from handler.protocols.decisions.openai import Decisions
from handler.protocols.decisions.systemone import SystemOneDialect
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Dialect, ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat, HttpResponse
from handler.protocols.kernel.stored import Wanted
from handler.protocols.llamacpp.tokenize import TOKENIZE as LLAMA_TOKENIZE
from handler.protocols.lmi.asynchronous import AsyncChat, AsyncCompletions, AsyncPrompt
from handler.protocols.lmi.chat import Chat
from handler.protocols.lmi.dynamic_batch import LmiDynamicBatch
from handler.protocols.lmi.embedding import LmiEmbedding
from handler.protocols.lmi.request import Lmi
from handler.protocols.openai.audio import Transcriptions, Translations
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.completions import OpenAiCompletions, OpenAiEmbeddings
from handler.protocols.openai.request import read_model
from handler.protocols.rerank.request import Rerank
from handler.protocols.responses.dialect import OpenAiResponses, ResponsesCompaction, ResponsesCount
from handler.protocols.tei.request import TeiEmbed, TeiPredict, TeiRerank, TeiSimilarity
from handler.protocols.tgi.invocations import tgi_invocations
from handler.protocols.tgi.mindie import Mindie
from handler.protocols.tgi.native import TOKENIZE as TGI_TOKENIZE
from handler.protocols.tgi.native import Tgi
from handler.protocols.tgi.response import TgiCompat
from handler.protocols.triton.infer import HEADER, SAGEMAKER_TYPE, Infer
from handler.protocols.triton.request import Route, Triton
from handler.protocols.vllm.pooling import VllmClassify, VllmPoolingDialect, VllmScoring
from handler.protocols.vllm.tokenize import TOKENIZE as VLLM_TOKENIZE
from handler.protocols.vllm.tokenize import TOKENIZE_CHAT

_TENSORS = "inputs[0].datatype"
"""The key in `DispatchByField.others` for bodies whose `inputs` are Triton's tensors."""


def _announces_tensors(headers: Mapping[str, str]) -> bool:
    """Return whether the headers announce a body with binary data."""
    return HEADER in headers or headers.get("content-type", "").lower().startswith(SAGEMAKER_TYPE)


def _has_tensors(body: Any) -> bool:
    """Return whether the `inputs` of a body are tensors."""
    inputs = body.get("inputs") if isinstance(body, dict) else None
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], dict) and "datatype" in inputs[0]


class DispatchByField(Dialect):
    """A route with several dialects. The fields of a body select the dialect.

    `inputs` selects the dialect of the server's mode. In a body without `inputs`, the dialect is selected by the first
    field of `others` that is present. Null fields count as absent.

    Args:
        mode: the dialect of the server's mode.
        others: maps a field to the dialect that it selects.
        before: the fields of `others` that select a dialect even if the body has `inputs`.
        otherwise: the field of `others` whose dialect refuses bodies without any known field; by default, `mode`
            refuses them.
    """

    def __init__(
        self, mode: Dialect, others: Mapping[str, Dialect], before: Sequence[str] = (), otherwise: str | None = None
    ) -> None:
        self.name = mode.name
        self._mode = mode
        self._others = others
        self._otherwise = mode if otherwise is None else others[otherwise]
        self._tensors = others.get(_TENSORS)
        if self._tensors is not None:
            self.media_types = self._tensors.media_types
        self.any_media, self.unique_keys, self.errors = mode.any_media, mode.unique_keys, self._otherwise.errors
        self.computes = self._otherwise.computes
        self._by_field = {**{field: others[field] for field in before}, "inputs": mode, **others}

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        """All dialects of the route, starting with the dialect of the mode."""
        return self._mode, *self._others.values()

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        return self.dialect_of(body).parse(body, context, request_context)

    def dialect_of(self, body: Any) -> Dialect:
        """Return the dialect that the fields of the body select."""
        if self._tensors is not None and _has_tensors(body):
            return self._tensors
        if isinstance(body, dict):
            for field, dialect in self._by_field.items():
                if body.get(field) is not None:
                    return dialect
        return self._otherwise

    def of_headers(self, headers: Mapping[str, str]) -> Dialect:
        return self if self._tensors is None or not _announces_tensors(headers) else self._tensors

    def wanted(self, body: Any) -> Wanted | None:
        return self.dialect_of(body).wanted(body)

    def errors_of(self, body: Any, context: ServerContext) -> ErrorFormat:
        return self.dialect_of(body).errors_of(body, context)


class DispatchByOpenAi(DispatchByField):
    """The dialects of /invocations under OpenAI's conventions, as in AWS's vLLM image and in TGI.

    An unknown `model` is ignored, and the model of the server is used.
    """

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if isinstance(body, dict):
            try:
                read_model(body, context, request_context)
            except ModelNotFound:
                parsed = super().parse({**body, "model": None}, context, request_context)
                return parsed._replace(ignored=[*parsed.ignored, "model"])
            except InvalidParameter:
                pass  # its type is wrong, which the dialect reports
        return super().parse(body, context, request_context)


TRITON_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
"""The paths of the model in Triton's protocol, without and with a version."""

_COMPLETIONS, _TRITON, _INFER = OpenAiCompletions(), Triton(Route.SHAPE), Infer(sagemaker=True)
_MESSAGES, _RESPONSES = AnthropicMessages(), OpenAiResponses()
_SYSTEMONE, _DECISIONS = SystemOneDialect(), Decisions()

_MODES: dict[str, Lmi | TgiCompat | LmiDynamicBatch] = {
    mode.name: mode for mode in (Lmi(), TgiCompat(), LmiDynamicBatch())
}


def _dialects_by_field(chat: Dialect, completions: Dialect) -> dict[str, Dialect]:
    return {
        "anthropic_version": _MESSAGES,
        "messages": chat,
        "prompt": completions,
        "text_input": _TRITON,
        "state": _SYSTEMONE,
        "questions": _DECISIONS,
        _TENSORS: _INFER,
    }


_ASYNC = AsyncPrompt()
_ASYNC_BY_FIELD = _dialects_by_field(AsyncChat(), AsyncCompletions())
_ASYNC_OF_TRTLLM = DispatchByField(_ASYNC, _ASYNC_BY_FIELD, before=("prompt", "messages"))
"""The dialects of LMI's async mode with TensorRT-LLM, whose handler checks the fields in a different order."""

INVOCATIONS: dict[str, Dialect] = {
    **{name: DispatchByField(mode, _dialects_by_field(Chat(mode), _COMPLETIONS)) for name, mode in _MODES.items()},
    _ASYNC.name: DispatchByField(_ASYNC, _ASYNC_BY_FIELD, before=("prompt",)),
}
"""Maps the name of a mode to the dialects of /invocations, which include LMI's chat."""

ROOTS: dict[str, Dialect] = {"tgi": Tgi("tgi", array=True, full_text=True), "mindie": Mindie()}
"""Maps a value of `option.root_schema` to the dialect of `/`."""

ROUTES: dict[str, Dialect] = {
    "/generate": Tgi("tgi_generate", streams=False),
    "/generate_stream": Tgi("tgi_generate_stream", streams=True),
    "/v1/chat/completions": OpenAiChat(),
    "/v1/completions": _COMPLETIONS,
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": ResponsesCount(),
    "/v1/responses/compact": ResponsesCompaction(),
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": AnthropicCountTokens(),
    "/v1/systemone": _SYSTEMONE,
    "/v1/decisions": _DECISIONS,
    **{f"{model}/{route.value}": Triton(route) for model in TRITON_MODEL for route in (Route.GENERATE, Route.STREAM)},
    **{f"{model}/infer": Infer() for model in TRITON_MODEL},
}
"""Maps the inference routes of a generating model to their dialects, except / and /invocations.

The HTTP host checks `{model}` and `{version}`.
"""

_EMBEDDINGS, _EMBED, _PREDICT = OpenAiEmbeddings(), TeiEmbed(), TeiPredict()
_SCORE = dict.fromkeys(("/score", "/v1/score"), VllmScoring())
_TRANSCRIPTIONS = Transcriptions()
_POOLING = {"/pooling": VllmPoolingDialect()}
_RERANK = Rerank("rerank", "Rerank", return_documents=True, truncation=None)
_RERANK_V2 = Rerank("rerank_v2", "Rerank, version 2", return_documents=False, truncation=Truncation(side="right"))
_RERANKS = {"/v1/rerank": _RERANK, "/v2/rerank": _RERANK_V2}
_RANKS = DispatchByField(TeiRerank(), {"documents": _RERANK})

TOKENIZING = DispatchByField(
    TGI_TOKENIZE, {"prompt": VLLM_TOKENIZE, "messages": TOKENIZE_CHAT, "content": LLAMA_TOKENIZE}
)
"""The dialects of /tokenize, a route of TGI, vLLM and llama-server."""

POOLED_ROUTES: dict[Task, dict[str, Dialect]] = {
    Task.EMBEDDING: {
        "/": _EMBED,
        "/v1/embeddings": _EMBEDDINGS,
        "/embed": _EMBED,
        "/similarity": TeiSimilarity(),
        "/rerank": _RERANK,
        **_RERANKS,
        **_SCORE,
        **_POOLING,
    },
    Task.RERANK: {
        "/": _RANKS,
        "/rerank": _RANKS,
        **_SCORE,
        **_RERANKS,
    },
    Task.CLASSIFICATION: {"/": _PREDICT, "/predict": _PREDICT, "/classify": VllmClassify(), **_POOLING},
    Task.TRANSCRIPTION: {
        "/": _TRANSCRIPTIONS,
        "/v1/audio/transcriptions": _TRANSCRIPTIONS,
        "/v1/audio/translations": Translations(),
    },
}
"""Maps each task other than generation to its routes and their dialects."""

POOLED_INVOCATIONS: dict[Task, Dialect] = {
    Task.EMBEDDING: DispatchByField(LmiEmbedding(), {"input": _EMBEDDINGS}),
    Task.RERANK: _RANKS,
    Task.CLASSIFICATION: _PREDICT,
    Task.TRANSCRIPTION: _TRANSCRIPTIONS,
}
"""Maps each task other than generation to the dialect of /invocations."""


def dialects() -> dict[str, Dialect]:
    """Return all dialects by name, including those that a field of the body selects."""
    pooled = [dialect for by_path in POOLED_ROUTES.values() for dialect in by_path.values()]
    generating = [*_MODES.values(), *ROOTS.values(), *ROUTES.values(), *INVOCATIONS.values()]
    return {
        member.name: member
        for dialect in (*generating, *pooled, *POOLED_INVOCATIONS.values())
        for member in dialects_of(dialect)
    }


def dialects_of(dialect: Dialect) -> tuple[Dialect, ...]:
    """Return the dialects that the dialect of a route dispatches to, or only the dialect itself."""
    return dialect.dialects if isinstance(dialect, DispatchByField) else (dialect,)


def routes(root_schema: str, task: Task = Task.GENERATION) -> dict[str, Dialect]:
    """Return the inference routes for a task with their dialects, including `/`."""
    return POOLED_ROUTES[task] if task in POOLED_ROUTES else {"/": ROOTS[root_schema], **ROUTES}


def choose(config: Config, task: Task = Task.GENERATION) -> Dialect:
    """Choose the dialect of /invocations.

    With `tgi_compat`, responses have the format of Hugging Face's containers. With `openai_compat`, chats get the same
    responses as on /v1/chat/completions. With `tgi_version`, all responses are as in that release of TGI. In
    LMI's async mode, the trtllm engine has its own dialects.
    """
    tgi_compat, asynchronous = config.tgi_compat, config.async_schema
    if task in POOLED_INVOCATIONS:
        return _BY_TEI if tgi_compat and task is Task.EMBEDDING else POOLED_INVOCATIONS[task]
    if config.tgi_version is not None and not asynchronous:
        prompts, chat, completions = tgi_invocations(config.tgi_version)
        otherwise = "messages" if config.openai_compat else None
        return DispatchByOpenAi(prompts, _dialects_by_field(chat, completions), otherwise=otherwise)
    if asynchronous:
        mode: Dialect = _ASYNC
    else:
        mode = _MODES["dynamic_batch" if config.rolling_batch == "disable" else "tgi_compat" if tgi_compat else "lmi"]
    if config.openai_compat:
        return DispatchByOpenAi(
            mode, _dialects_by_field(ROUTES["/v1/chat/completions"], _COMPLETIONS), otherwise="messages"
        )
    return _ASYNC_OF_TRTLLM if asynchronous and config.engine == "trtllm" else INVOCATIONS[mode.name]


_BY_TEI = DispatchByField(_EMBED, {"input": _EMBEDDINGS})

# -- paths that are not served -----------------------------------------------------------------------------------

_TEI_PATHS = {
    "/embed_all": "the engines return one vector per text, not per token",
    "/embed_sparse": "no engine computes sparse vectors",
    "/embeddings": "call /v1/embeddings instead",
    "/decode": "token ids cannot be decoded for this task",
    "/vertex": "send each instance in a separate request",
}
"""Maps the other routes of text-embeddings-inference to the reasons why they are not served."""

_LLAMA_PATHS = {
    "/completion": "call /v1/completions instead",
    "/completions": "call /v1/completions instead",
    "/embedding": "call /v1/embeddings instead",
    "/infill": "call /v1/completions, with the model's own tokens before the prefix, the suffix and the middle",
    "/props": "call /info and /v1/models instead",
    "/slots": "/metrics counts the requests that run and wait",
    "/lora-adapters": "a request selects an adapter by its name as `model`; /adapters lists them",
    "/tools": "send `tools` to /v1/chat/completions; this server runs none itself",
    "/cors-proxy": "only its web page calls it",
    "/v1/chat/completions/input_tokens": "send the messages to /tokenize, which counts their tokens",
    "/v1/chat/completions/control": "send reasoning_effort or chat_template_kwargs with the request instead",
    "/v1/stream": "only /v1/responses with background=true can be resumed",
    "/v1/streams/lookup": "only /v1/responses with background=true can be resumed",
}
"""Maps routes of llama-server to what a client can do instead."""

_OLLAMA_PATHS = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    **dict.fromkeys(("/api/tags", "/api/ps", "/api/show"), "/v1/models"),
    "/api/version": "/info",
}
"""Maps routes of Ollama to those that do the same here."""

_REASONS = {
    **_TEI_PATHS,
    **{path: f"it is a route of Ollama's own; call {route} instead" for path, route in _OLLAMA_PATHS.items()},
    **{path: f"it is a route of llama-server's own; {instead}" for path, instead in _LLAMA_PATHS.items()},
}

_FAMILIES: dict[str, ErrorFormat] = {
    "/v1/messages": _MESSAGES.errors,
    "/v1/complete": _MESSAGES.errors,
    "/v1/rerank": _RERANK.errors,
    "/v2/rerank": _RERANK.errors,
    "/v1": _COMPLETIONS.errors,
    "/v2": _TRITON.errors,
    **dict.fromkeys((*_LLAMA_PATHS, *_OLLAMA_PATHS), _COMPLETIONS.errors),
    **dict.fromkeys(("/embed", "/similarity", "/rerank", "/predict", *_TEI_PATHS), _EMBED.errors),
}
"""Maps path prefixes to the error format of the dialect that they belong to. Longer prefixes come first."""


PATHS = frozenset(path for path in (*_REASONS, *ROUTES, *chain(*POOLED_ROUTES.values())) if "{" not in path)
"""Fixed paths, served or not, that a route with a parameter might match (such as /v1/responses/{id})."""


def refuse_path(path: str, task: Task) -> HttpResponse | None:
    """Return the error response for a path that is not served, or None if the path belongs to no dialect.

    The error has the format of the dialect to which the path belongs.
    """
    error = NotFound(f"{path[:64]} is not served here{_reason_for(path, task)}; /docs lists the routes that are")
    for other in (ROUTES, *POOLED_ROUTES.values()):
        if path in other:
            return other[path].errors.whole(error)
    families = (errors for family, errors in _FAMILIES.items() if path == family or path.startswith(f"{family}/"))
    return next((errors.whole(error) for errors in families), None)


_DOUBLED = re.compile(r"(/v[12])(?=\1(?:/|$))")


def _reason_for(path: str, task: Task) -> str:
    if doubled := _DOUBLED.match(path):
        return f": the base URL of the client ends with {doubled[1]} already; call {path[doubled.end() :][:64]}"
    if path == "/v1":
        return ": it is the base URL of clients; call a route below it, such as /v1/chat/completions"
    if reason := _REASONS.get(path) or _REASONS.get(f"/{path.lstrip('/').partition('/')[0]}"):  # such as /slots/0
        return f": {reason}"
    needed = [other for other, served in {Task.GENERATION: ROUTES, **POOLED_ROUTES}.items() if path in served]
    if not needed:
        return ""
    tasks = " or ".join(other.value for other in needed)
    return f": it requires option.task={tasks}, but this model's task is {task.value}"
