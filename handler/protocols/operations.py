"""The data of the OpenAPI document: groups and summaries of routes, examples, and the non-inference routes."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from handler import __version__
from handler.core.errors import (
    AdapterFailed,
    BadRequest,
    Conflict,
    InvalidPayload,
    ModelNotFound,
    NoRoom,
    NotFound,
    ServingError,
    Unavailable,
)
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Delta, Extras, Finish, Pooling, Request, Task, Token
from handler.protocols.anthropic.api import ERRORS as ANTHROPIC_ERRORS
from handler.protocols.anthropic.api import PAGE, AnthropicError
from handler.protocols.anthropic.api import listed as listed_messages
from handler.protocols.anthropic.batches import BATCHES as MESSAGE_BATCHES
from handler.protocols.anthropic.batches import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatches,
    MessageResult,
    message_batch,
)
from handler.protocols.anthropic.models import LIFECYCLES, AnthropicModel, AnthropicModels
from handler.protocols.api import (
    AdapterChange,
    Adapters,
    DescribedAdapter,
    DescribedModel,
    ExecutionParameters,
    ModelState,
    ModelVersions,
    WorkerGroup,
)
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect, WithoutEngine
from handler.protocols.kernel.errors import SERVER, ErrorFormat, FrontEndError
from handler.protocols.kernel.messages import MESSAGES
from handler.protocols.kernel.schema import COUNT, FLAG, TEXT, Shape, listing, nullable, record, ref
from handler.protocols.kernel.texts import NON_EMPTY
from handler.protocols.llamacpp.tokenize import FLAGS as LLAMA_FLAGS
from handler.protocols.llamacpp.tokenize import LlamaPrompt, LlamaTokens
from handler.protocols.openai.api import ERRORS as OPENAI_ERRORS
from handler.protocols.openai.api import (
    DeletedFile,
    OpenAiBatch,
    OpenAiBatches,
    OpenAiError,
    OpenAiFile,
    OpenAiFiles,
    OpenAiModel,
    OpenAiModels,
    ServedModels,
    listed,
    listed_models,
)
from handler.protocols.openai.batches import (
    DAY,
    INPUT,
    LIFETIME,
    NewBatch,
    deleted,
    new_batch,
    new_file,
    no_batch,
    no_file,
)
from handler.protocols.registry import ROUTES
from handler.protocols.responses.api import (
    Conversation,
    ConversationItems,
    DeletedConversation,
    DeletedResponse,
    OpenAiResponse,
    ResponseItems,
    no_conversation,
    not_kept,
)
from handler.protocols.responses.background import not_cancellable
from handler.protocols.responses.conversations import MAX_ITEMS, deleted_conversation
from handler.protocols.responses.types import INCLUDED
from handler.protocols.tgi.api import UNHEALTHY, TgiChatPieces, TgiError, TgiInfo, TgiPiece
from handler.protocols.triton.api import ERRORS as TRITON_ERRORS
from handler.protocols.triton.api import (
    TritonConfig,
    TritonError,
    TritonMetadata,
    TritonServer,
    TritonState,
    TritonStatistics,
    TritonTensor,
    TritonTensorConfig,
    statistics,
)
from handler.protocols.vllm.api import ERRORS as VLLM_ERRORS
from handler.protocols.vllm.api import VllmError, VllmLoad, VllmText, VllmTokens, VllmVersion

# -- example responses: each dialect parses its own example and renders fixed tokens, without an engine ----------------


_CONTEXT = ServerContext("echo", task=Task.CLASSIFICATION, labels=("NEGATIVE", "POSITIVE"), no_media={"audio": ""})
_VECTORS = {"embed": ((0.6, -0.8), (0.8, -0.6), (0.8, 0.6)), "score": ((0.1,), (0.9,)), "classify": ((0.1, 0.9),)}
"""Maps the kind of `Pooling` to the numbers for the requests of the example."""

_CITIES = (Token(7042, " Paris.", -0.4, False), Token(10505, " Rome.", -0.4, False))
_SPEECH = Token(8502, "Good morning.", -0.4, False)
_END = Token(2, "", -0.1, True)
_NUM_PROMPT_TOKENS = 12

_ID = re.compile(r'"(\w+[-_])[0-9a-f-]{24,}"')
_DRAWN = re.compile(r'"(created|created_at|completed_at|seed)":[0-9]+')
_SEALED = re.compile(r'("encrypted_content":")[\w=-]+')
_FIXED = 1760000000  # replaces times and seeds


@functools.cache
def example_response(dialect: Dialect) -> Any:
    """Return the non-streaming response of a dialect to its own example. Ids, times, seeds and summaries are fixed."""
    parsed = dialect.parse(dialect.description.example, _CONTEXT)
    if isinstance(parsed.course, WithoutEngine):
        parsed.course.take(Prompt("", [0] * _NUM_PROMPT_TOKENS, Vocabulary([b""])))
    body = b""
    for index, request in enumerate(parsed.requests):
        parsed.reply.start(index, _NUM_PROMPT_TOKENS)
        for delta in _deltas(index, request):
            if not parsed.reply.finished:  # a document made from the prompt alone ends with the first delta
                body += parsed.reply.feed(index, delta)
    text = _DRAWN.sub(rf'"\1":{_FIXED}', _ID.sub(r'"\g<1>0"', _SEALED.sub(r"\1AQ==", body.decode())))
    return json.loads(text)


def _deltas(index: int, request: Request) -> list[Delta]:
    """Return the deltas that an engine would yield for the request with this index."""
    if request.pooling is not None:
        return [Delta(1, 0, (), Finish.STOP, extras=Extras(vector=_numbers(request.pooling, index)))]
    token = _SPEECH if request.transcribes else _CITIES[index]
    if request.messages:  # the response to a chat begins without a space
        token = token._replace(text=token.text.lstrip())
    return [Delta(1, 0, (token,)), Delta(1, 0, (_END,), Finish.EOS)]


def _numbers(pooling: Pooling, index: int) -> Sequence[float]:
    """Return the numbers for the request with this index. Each label is half as likely as the label before it."""
    if pooling.kind == "labels":
        return (*(math.log(0.5 ** (1 + number)) for number in range(len(pooling.labels))), math.log(0.5))
    return _VECTORS[pooling.kind][index]


Response = tuple[str, Any, Any]
"""The content type, the Python type and an example of a response."""


class Operation(NamedTuple):
    """An operation that is not for inference.

    Attributes:
        responses: maps a status to its response.
        query: maps the names of query parameters to their schemas.
        body: the schema of an optional JSON body.
        form: the schema of a required form.
        open: whether the operation needs no API key.
    """

    tag: str
    summary: str
    responses: Mapping[int, Response]
    query: Mapping[str, Shape] = MappingProxyType({})
    body: Shape | None = None
    form: Shape | None = None
    open: bool = False


Operations = Mapping[tuple[str, str], Operation]
"""The operations of paths and methods."""


# -- routes for inference ----------------------------------------------------------------------------------------------

_SHAPED = "Generate a response, whole or as a stream; the body's fields select the request format"
_TRITON_WHOLE, _TRITON_STREAM = (
    "Generate a non-streaming response, as Triton's generate extension does",
    "Generate a response as a stream of events, as Triton's generate extension does",
)
_INFER = "Generate a non-streaming response from tensors, as JSON or binary data"
_OF_VERSION = "; this path includes the version"

INFERENCE: dict[str, tuple[str, str]] = {
    "/invocations": ("SageMaker and LMI", f"{_SHAPED}. SageMaker calls only this route"),
    "/predictions/{model}": ("SageMaker and LMI", f"{_SHAPED}. DJL Serving's path"),
    "/predictions/{model}/{version}": ("SageMaker and LMI", f"{_SHAPED}. DJL Serving's path with the version"),
    "/models/{model}/invoke": ("SageMaker and LMI", f"{_SHAPED}. The path of multi-model endpoints"),
    "/": ("TGI", "Respond as TGI, MindIE (option.root_schema) or text-embeddings-inference does at its root path"),
    "/generate": ("TGI", "Generate a non-streaming response to `inputs`"),
    "/generate_stream": ("TGI", "Generate a response to `inputs` as a stream of events"),
    "/v1/chat/completions": ("OpenAI", "Respond to a chat; supports streams, tools, images and structured output"),
    "/v1/completions": ("OpenAI", "Continue or score one or more prompts"),
    "/v1/responses": ("OpenAI", "Respond to a request of the Responses API"),
    "/v1/responses/compact": ("OpenAI", "Summarize a conversation, and return the items of the next request"),
    "/v1/responses/input_tokens": ("OpenAI", "Count the tokens of a request to /v1/responses without answering it"),
    "/v1/embeddings": ("OpenAI", "Compute an embedding for each text"),
    "/v1/audio/transcriptions": ("OpenAI", "Transcribe audio in the spoken language"),
    "/v1/audio/translations": ("OpenAI", "Translate audio into English text"),
    "/v1/messages": ("Anthropic", "Respond to a conversation, as Anthropic's Messages API does"),
    "/v1/messages/count_tokens": ("Anthropic", "Count the tokens of a request to /v1/messages without answering it"),
    "/v1/systemone": ("Decisions", "Return the probability of each option of questions about a state"),
    "/v1/decisions": ("Decisions", "Return the probability of each option of questions about an input"),
    "/v2/models/{model}/generate": ("Triton", _TRITON_WHOLE),
    "/v2/models/{model}/generate_stream": ("Triton", _TRITON_STREAM),
    "/v2/models/{model}/infer": ("Triton", _INFER),
    "/v2/models/{model}/versions/{version}/infer": ("Triton", _INFER + _OF_VERSION),
    "/v2/models/{model}/versions/{version}/generate": ("Triton", _TRITON_WHOLE + _OF_VERSION),
    "/v2/models/{model}/versions/{version}/generate_stream": ("Triton", _TRITON_STREAM + _OF_VERSION),
    "/embed": ("Text Embeddings Inference", "Compute an embedding for each text; the response is only their list"),
    "/similarity": ("Text Embeddings Inference", "Compare a sentence with each of several other sentences"),
    "/rerank": ("Text Embeddings Inference", "Rank texts by how well they answer a query"),
    "/predict": ("Text Embeddings Inference", "Label texts, or pairs of texts"),
    "/v1/rerank": ("Cohere", "Rank documents by how well they answer a query; the response repeats the documents"),
    "/v2/rerank": ("Cohere", "Rank documents by how well they answer a query; the response contains their indexes"),
    "/score": ("vLLM", "Score pairs of texts"),
    "/v1/score": ("vLLM", "Score pairs of texts; this path includes the API's version"),
    "/pooling": ("vLLM", "Return the output of the model's pooler for each text"),
    "/classify": ("vLLM", "Label texts; the response contains the probability of each label"),
}
"""Maps the path of an inference route to its group and its summary."""

GROUPS: dict[str, str] = {
    "SageMaker and LMI": "Requests in the format of LMI, OpenAI, Anthropic or Triton; the body's fields select it",
    "OpenAI": "The routes that OpenAI's SDKs call, under /v1",
    "Anthropic": "The routes that Anthropic's SDKs call, under /v1",
    "Decisions": "The routes that return probabilities instead of text, for TypeSafe's and OpenAI's SDKs",
    "TGI": "The routes of Hugging Face's Text Generation Inference",
    "Text Embeddings Inference": "The routes of Hugging Face's Text Embeddings Inference",
    "Cohere": "The routes that Cohere's client calls",
    "Triton": "NVIDIA Triton's generate extension, and its routes that describe the model",
    "vLLM": "Routes of vLLM's server that are not part of OpenAI's API",
    "llama.cpp": "Routes of llama-server that are not part of OpenAI's API",
    "Adapters": "Registration, description and removal of LoRA adapters",
    "State": "Health, the model's state, and metrics",
    "Page": "Pages for a browser",
}
"""Maps the groups of routes to their descriptions, in document order."""

PATH_PARAMETERS: dict[str, str] = {
    "model": "The model's name (option.model_name)",
    "version": "The model's version, always 1",
    "adapter": "The adapter's name",
    "id": "The name of the model or of an adapter",
    "response": "The id of a stored response",
    "file": "The id of a file",
    "batch": "The id of a batch",
}


# -- the server's own routes -------------------------------------------------------------------------------------------


def _failure(errors: ErrorFormat, kind: Any, error: ServingError) -> Response:
    """Return the response of a route to an error, in the format of `errors`."""
    return _JSON, kind, errors.body(error)


_OTHER_MODEL = ModelNotFound("other")
_JSON, _TEXT, _HTML = "application/json", "text/plain", "text/html"
_MODEL_EXAMPLE: OpenAiModel = {
    "id": "model",
    "object": "model",
    "created": 1760000000,
    "owned_by": "lmi-handler",
    "root": "SmolLM2-135M-Instruct",
    "parent": None,
    "max_model_len": 8192,
    "input_modalities": ["text"],
    "supported_parameters": ["max_tokens", "temperature"],
}
_GROUP: WorkerGroup = {
    "device": {"deviceType": "cpu", "deviceId": -1},
    "minWorkers": 1,
    "maxWorkers": 1,
    "workers": [{"id": 1, "startTime": "2026-11-22T01:30:39Z", "status": "READY"}],
}
_DESCRIBED: DescribedModel = {
    "modelName": "model", "modelUrl": None, "engine": "openvino", "batchSize": 1, "maxBatchDelayMillis": 100,
    "queueSize": 1000, "requestInQueue": 0, "status": "READY", "loadedAtStartup": True, "workerGroups": [_GROUP],
}  # fmt: skip
_ADAPTER_EXAMPLE: DescribedAdapter = {"name": "sql", "id": 1, "src": "adapters/sql", "preload": True, "pin": False}
_ADAPTER_CALL = {"name": TEXT, "src": TEXT, "preload": FLAG, "pin": FLAG}

_FAILURES: dict[int, Response] = {
    error.status: _failure(SERVER, FrontEndError, error)
    for error in (
        BadRequest("LoRA is not enabled: echo: it was started without option.enable_lora=true"),
        NotFound("The adapter sql was not found"),
        Conflict("The adapter sql already exists"),
        AdapterFailed("src=adapters/sql: there is no such directory"),
        Unavailable("the engine is not ready: no adapter can be loaded"),
        NoRoom("the limit of 2 adapters is reached (SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY)"),
    )
}
"""Maps a status to an example error of the adapter routes."""


def _adapters(summary: str, kind: Any, example: Any, *failures: int, **request: Any) -> Operation:
    responses = {200: (_JSON, kind, example)} | {status: _FAILURES[status] for status in failures}
    return Operation("Adapters", summary, responses, **request)


_ADAPTERS: Operations = {
    ("GET", "/adapters"): _adapters(
        "List the LoRA adapters", Adapters, {"adapters": [_ADAPTER_EXAMPLE]}, 400,
        query={"limit": COUNT, "next_page_token": TEXT},
    ),
    ("POST", "/adapters"): _adapters(
        "Register an adapter; its fields may be in the query or in the body",
        AdapterChange, {"status": "Adapter sql registered", "id": 1}, 400, 409, 424, 503, 507,
        query=_ADAPTER_CALL, body=record({}, _ADAPTER_CALL, example={"name": "sql", "src": "adapters/sql"}),
    ),
    ("GET", "/adapters/{adapter}"): _adapters("Describe an adapter", DescribedAdapter, _ADAPTER_EXAMPLE, 400, 404),
    ("DELETE", "/adapters/{adapter}"): _adapters(
        "Unregister an adapter", AdapterChange, {"status": "Adapter sql unregistered"}, 400, 404, 409
    ),
    ("POST", "/adapters/{adapter}/update"): _adapters(
        "Reload an adapter from its directory, or from another directory",
        AdapterChange, {"status": "Adapter sql updated"}, 400, 404, 409, 424, 503,
        query=_ADAPTER_CALL, body=record({}, _ADAPTER_CALL, example={"src": "adapters/sql"}),
    ),
}  # fmt: skip

_OF_SERVER: Operations = {
    ("GET", "/"): Operation(
        "Page", "Show the chat page to browsers; tell other clients whether the model can serve, as TGI does",
        {200: (_HTML, str, "<!doctype html>"),
         503: (_JSON, TgiError, UNHEALTHY)}, open=True,
    ),
    ("GET", "/docs"): Operation("Page", "Show all routes on a page", {200: (_HTML, str, "<!doctype html>")}, open=True),
    ("GET", "/api-doc/openapi.json"): Operation(
        "Page", "Return the OpenAPI 3.1 document of all routes", {200: (_JSON, dict, {"openapi": "3.1.0"})}
    ),
    ("GET", "/ping"): Operation(
        "State", "Report whether the model can serve, in the format that SageMaker and DJL Serving expect",
        {200: (_JSON, ModelState, {"status": "Healthy", "state": "ready"}),
         503: (_JSON, ModelState, {"status": "Unhealthy", "state": "loading"})}, open=True,
    ),
    ("GET", "/models"): Operation(
        "State", "List the model as DJL Serving does, and as /v1/models does",
        {200: (_JSON, ServedModels,
               {"models": [{"modelName": "model", "modelUrl": None, "status": "READY"}], "object": "list",
                "data": [_MODEL_EXAMPLE]})},
    ),
    ("GET", "/models/{model}"): Operation(
        "State", "Describe the model, its queue and its workers",
        {200: (_JSON, list[ModelVersions], [{"modelName": "model", "models": [_DESCRIBED]}]),
         404: _failure(SERVER, FrontEndError, _OTHER_MODEL)},
    ),
    ("GET", "/metrics"): Operation(
        "State", "Export the metrics in Prometheus's text format",
        {200: (_TEXT, str, "# TYPE lmi_active_sequences gauge\nlmi_active_sequences 0.0\n")},
    ),
    ("GET", "/execution-parameters"): Operation(
        "State", "Tell SageMaker's batch transform how to call the server",
        {200: (_JSON, ExecutionParameters,
               {"MaxConcurrentTransforms": 32, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 3})},
    ),
    ("GET", "/v1/models"): Operation(
        "OpenAI", "List the model and its adapters, in Anthropic's format if the header anthropic-version is sent",
        {200: (_JSON, OpenAiModels | AnthropicModels, listed_models([_MODEL_EXAMPLE]))},
        query={**PAGE, "lifecycle": listing({"enum": [*LIFECYCLES]})},
    ),
    ("GET", "/v1/models/{id}"): Operation(
        "OpenAI", "Describe the model or an adapter, in Anthropic's format if the header anthropic-version is sent",
        {200: (_JSON, OpenAiModel | AnthropicModel, _MODEL_EXAMPLE),
         404: _failure(OPENAI_ERRORS, OpenAiError | AnthropicError, _OTHER_MODEL)},
    ),
    **_ADAPTERS,
    **{
        (method, "/models/{model}" + path): operation._replace(
            summary=f"{operation.summary}. DJL Serving's path with the model's name",
            responses={404: _FAILURES[404], **operation.responses},
        )
        for (method, path), operation in _ADAPTERS.items()
    },
}  # fmt: skip

# -- TGI's other routes ------------------------------------------------------------------------------------------------

_OF_TOKENS = {"model": nullable(TEXT), "add_special_tokens": nullable(FLAG), "return_token_strs": nullable(FLAG)}
_OF_CHATS = {"add_generation_prompt": FLAG, "continue_final_message": FLAG, "chat_template_kwargs": {"type": "object"}}
_TOKENIZE_BODIES = (
    record({"prompt": NON_EMPTY}, _OF_TOKENS),
    record({"messages": MESSAGES}, {**_OF_TOKENS, **{name: nullable(shape) for name, shape in _OF_CHATS.items()}}),
)
"""The schemas of vLLM's bodies for /tokenize, a route that TGI also has."""

_LLAMA_BODY = record({"content": TEXT}, {"model": nullable(TEXT), **dict.fromkeys(LLAMA_FLAGS, nullable(FLAG))})

_UNHEALTHY = (_JSON, TgiError, UNHEALTHY)
_INFO_EXAMPLE: TgiInfo = {
    "model_id": "model", "model_sha": None, "model_pipeline_tag": "text-generation", "max_concurrent_requests": 1032,
    "max_best_of": 2, "max_stop_sequences": 4, "max_input_tokens": 8191, "max_total_tokens": 8192,
    "validation_workers": 2, "max_client_batch_size": 256, "router": "lmi-handler", "version": __version__, "sha": None,
    "docker_label": None, "default_sampling_params": {"temperature": 0.6, "top_p": 0.9},
}  # fmt: skip
_PIECES_EXAMPLE = [{"id": 28120, "text": "Hello", "start": 0, "stop": 5}]

_OF_TGI: Operations = {
    ("GET", "/info"): Operation(
        "TGI", "Describe the model and the server's limits", {200: (_JSON, TgiInfo, _INFO_EXAMPLE)}
    ),
    ("GET", "/health"): Operation(
        "TGI",
        "Report whether the model can serve, in TGI's format",
        {200: (_TEXT, str, ""), 503: _UNHEALTHY},
        open=True,
    ),
    ("POST", "/tokenize"): Operation(
        "TGI",
        "Tokenize `inputs` as TGI does, `prompt` or `messages` as vLLM does, or `content` as llama-server does",
        {200: (_JSON, list[TgiPiece] | VllmTokens | LlamaTokens, _PIECES_EXAMPLE)},
        body={"anyOf": [ref("TgiGenerateRequest"), *_TOKENIZE_BODIES, _LLAMA_BODY], "example": {"inputs": "Hello"}},
    ),
    ("POST", "/chat_tokenize"): Operation(
        "TGI",
        "Apply the chat template and tokenize the result",
        {200: (_JSON, TgiChatPieces, {"tokenize_response": _PIECES_EXAMPLE, "templated_text": "Hello"})},
        body={**ref("OpenAiChatRequest"), "example": {"messages": [{"role": "user", "content": "Hello"}]}},
    ),
}

# -- OpenAI's stored responses -----------------------------------------------------------------------------------------

_NO_RESPONSE = _failure(OPENAI_ERRORS, OpenAiError, not_kept("resp_0"))
_RESPONSE = example_response(ROUTES["/v1/responses"])
_ITEM = {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}
_PAGE: ResponseItems = {
    "object": "list", "data": [_ITEM], "first_id": "msg_1", "last_id": "msg_1", "has_more": False,
}  # fmt: skip
_NEEDS = "needs option.responses_store"

_CONVERSATION: Conversation = {
    "id": "conv_0", "object": "conversation", "created_at": _FIXED, "metadata": {"topic": "demo"},
}  # fmt: skip
_NO_CONVERSATION = _failure(OPENAI_ERRORS, OpenAiError, no_conversation("conv_0"))
_CONVERSATION_ITEMS = {"items": [{"type": "message", "role": "user", "content": "Hello."}]}
_ADDED_ITEMS = listing({"type": "object"}, maxItems=MAX_ITEMS)
_METADATA = {"type": "object", "additionalProperties": TEXT}
_STORED_ITEM = {**_ITEM, "status": "completed"}
_OF_INCLUDE = {"include[]": listing({"enum": [*INCLUDED]})}


def _of_conversations(summary: str, kind: Any, example: Any, **request: Any) -> Operation:
    responses = {200: (_JSON, kind, example), 404: _NO_CONVERSATION}
    return Operation("OpenAI", f"{summary}; {_NEEDS}", responses, **request)


_OF_PAGES: Mapping[str, Shape] = {"limit": COUNT, "order": TEXT, "after": TEXT}

_OF_RESPONSES: Operations = {
    ("POST", "/v1/conversations"): _of_conversations(
        "Create a conversation", Conversation, _CONVERSATION,
        body={**record({}, {"items": _ADDED_ITEMS, "metadata": _METADATA}),
              "example": {**_CONVERSATION_ITEMS, "metadata": _CONVERSATION["metadata"]}},
    ),
    ("GET", "/v1/conversations/{conversation}"): _of_conversations("Show a conversation", Conversation, _CONVERSATION),
    ("POST", "/v1/conversations/{conversation}"): _of_conversations(
        "Replace the metadata of a conversation", Conversation, _CONVERSATION,
        body={**record({"metadata": _METADATA}), "example": {"metadata": _CONVERSATION["metadata"]}},
    ),
    ("DELETE", "/v1/conversations/{conversation}"): _of_conversations(
        "Delete a conversation with its items", DeletedConversation, deleted_conversation("conv_0")
    ),
    ("GET", "/v1/conversations/{conversation}/items"): _of_conversations(
        "List the items of a conversation", ConversationItems, {**_PAGE, "data": [_STORED_ITEM]},
        query={**_OF_PAGES, **_OF_INCLUDE},
    ),
    ("POST", "/v1/conversations/{conversation}/items"): _of_conversations(
        "Add items to a conversation", ConversationItems, {**_PAGE, "data": [_STORED_ITEM]},
        query=_OF_INCLUDE, body={**record({"items": _ADDED_ITEMS}), "example": _CONVERSATION_ITEMS},
    ),
    ("GET", "/v1/conversations/{conversation}/items/{item}"): _of_conversations(
        "Show an item of a conversation", dict[str, Any], _STORED_ITEM, query=_OF_INCLUDE
    ),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}"): _of_conversations(
        "Delete an item of a conversation", Conversation, _CONVERSATION
    ),
    ("GET", "/v1/responses/{response}"): Operation(
        "OpenAI", f"Show a stored response, or with stream=true the events of a background response; {_NEEDS}",
        {200: (_JSON, OpenAiResponse, {**_RESPONSE, "store": True}), 404: _NO_RESPONSE},
        query={"stream": FLAG, "starting_after": COUNT},
    ),
    ("POST", "/v1/responses/{response}/cancel"): Operation(
        "OpenAI", f"Cancel a background response; {_NEEDS}",
        {200: (_JSON, OpenAiResponse, {**_RESPONSE, "background": True, "store": True, "status": "cancelled"}),
         400: _failure(OPENAI_ERRORS, OpenAiError, not_cancellable("resp_0")), 404: _NO_RESPONSE},
    ),
    ("DELETE", "/v1/responses/{response}"): Operation(
        "OpenAI", f"Delete a stored response; {_NEEDS}",
        {200: (_JSON, DeletedResponse, {"id": "resp_0", "object": "response", "deleted": True}),
         404: _NO_RESPONSE},
    ),
    ("GET", "/v1/responses/{response}/input_items"): Operation(
        "OpenAI", f"List the input of a stored response; {_NEEDS}",
        {200: (_JSON, ResponseItems, _PAGE), 404: _NO_RESPONSE},
        query=_OF_PAGES,
    ),
}  # fmt: skip

# -- OpenAI's files and batches --------------------------------------------------------------------------------------

_FILE = new_file("file-0", "requests.jsonl", 175, _FIXED, LIFETIME)
_NEW_BATCH = {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
_BATCH = new_batch("batch_0", NewBatch("file-0", "/v1/chat/completions", "24h", DAY, LIFETIME, None, ()), _FIXED)
_NO_FILE = _failure(OPENAI_ERRORS, OpenAiError, no_file("file-0"))
_NO_BATCH = _failure(OPENAI_ERRORS, OpenAiError, no_batch("batch_0"))
_UPLOAD = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": INPUT}}
_EXPIRY = {"expires_after[anchor]": {"const": "created_at"}, "expires_after[seconds]": COUNT}
_LIST = {"limit": COUNT, "after": TEXT}


def _of_files(summary: str, response: Response, missing: Response = _NO_FILE, **request: Any) -> Operation:
    return Operation("OpenAI", f"{summary}; needs option.batches_store", {200: response, 404: missing}, **request)


def _of_batches(summary: str, kind: Any, example: Any, **request: Any) -> Operation:
    return _of_files(summary, (_JSON, kind, example), _NO_BATCH, **request)


_OF_BATCHES: Operations = {
    ("GET", "/v1/files"): _of_files(
        "List files", (_JSON, OpenAiFiles, listed([_FILE], has_more=False)),
        query={**_LIST, "order": TEXT, "purpose": TEXT},
    ),
    ("POST", "/v1/files"): _of_files(
        "Upload a file of requests", (_JSON, OpenAiFile, _FILE), form=record(_UPLOAD, _EXPIRY)
    ),
    ("GET", "/v1/files/{file}"): _of_files("Describe a file", (_JSON, OpenAiFile, _FILE)),
    ("DELETE", "/v1/files/{file}"): _of_files(
        "Delete a file", (_JSON, DeletedFile, deleted("file-0"))
    ),
    ("GET", "/v1/files/{file}/content"): _of_files(
        "Download a file", ("application/octet-stream", str, '{"custom_id": "1", "method": "POST"}')
    ),
    ("GET", "/v1/batches"): _of_batches("List batches", OpenAiBatches, listed([_BATCH], has_more=False), query=_LIST),
    ("POST", "/v1/batches"): _of_batches(
        "Start a batch that runs the requests of a file", OpenAiBatch, _BATCH,
        body=record(
            dict.fromkeys(_NEW_BATCH, TEXT),
            {"metadata": {"type": "object"}, "output_expires_after": {"type": "object"}},
            example=_NEW_BATCH,
        ),
    ),
    ("GET", "/v1/batches/{batch}"): _of_batches("Describe a batch", OpenAiBatch, _BATCH),
    ("POST", "/v1/batches/{batch}/cancel"): _of_batches(
        "Cancel a batch", OpenAiBatch, {**_BATCH, "status": "cancelling", "cancelling_at": _FIXED}
    ),
}  # fmt: skip

# -- Anthropic's message batches -----------------------------------------------------------------------------------

_NEW_MESSAGES = NewBatch("file-0", "/v1/messages", "24h", DAY, LIFETIME, None, (), total=1)
_MESSAGE_BATCH = message_batch(new_batch("msgbatch_0", _NEW_MESSAGES, _FIXED), 0)
_PARAMS = {"model": "model", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
_REQUESTS = {"type": "array", "items": record({"custom_id": TEXT, "params": {"type": "object"}})}
_RESULT: MessageResult = {"custom_id": "1", "result": {"type": "expired"}}


def _of_messages(summary: str, response: Response, **request: Any) -> Operation:
    missing = _failure(ANTHROPIC_ERRORS, AnthropicError, no_batch("msgbatch_0"))
    return Operation("Anthropic", f"{summary}; needs option.batches_store", {200: response, 404: missing}, **request)


_OF_MESSAGE_BATCHES: Operations = {
    ("GET", MESSAGE_BATCHES): _of_messages(
        "List message batches",
        (_JSON, MessageBatches, listed_messages([_MESSAGE_BATCH], has_more=False)),
        query=PAGE,
    ),
    ("POST", MESSAGE_BATCHES): _of_messages(
        "Start a batch of requests to /v1/messages",
        (_JSON, MessageBatch, _MESSAGE_BATCH),
        body=record({"requests": _REQUESTS}, example={"requests": [{"custom_id": "1", "params": _PARAMS}]}),
    ),
    ("GET", f"{MESSAGE_BATCHES}/{{batch}}"): _of_messages(
        "Describe a message batch", (_JSON, MessageBatch, _MESSAGE_BATCH)
    ),
    ("DELETE", f"{MESSAGE_BATCHES}/{{batch}}"): _of_messages(
        "Delete a message batch that has ended",
        (_JSON, DeletedMessageBatch, {"id": "msgbatch_0", "type": "message_batch_deleted"}),
    ),
    ("POST", f"{MESSAGE_BATCHES}/{{batch}}/cancel"): _of_messages(
        "Cancel a message batch", (_JSON, MessageBatch, _MESSAGE_BATCH)
    ),
    ("GET", f"{MESSAGE_BATCHES}/{{batch}}/results"): _of_messages(
        "Download the results of a message batch that has ended, as JSON lines",
        ("application/x-jsonl", MessageResult, _RESULT),
    ),
}

# -- Triton's other routes ---------------------------------------------------------------------------------------------

_UNKNOWN_MODEL = _failure(TRITON_ERRORS, TritonError, _OTHER_MODEL)
_STATE = {200: (_TEXT, str, ""), 503: (_TEXT, str, "")}
_INPUT: TritonTensor = {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
_OUTPUT: TritonTensor = {"name": "text_output", "datatype": "BYTES", "shape": [-1, -1]}
_INPUT_CONFIG: TritonTensorConfig = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False}

_CONFIG: TritonConfig = {
    "name": "model",
    "platform": "openvino",
    "backend": "openvino",
    "max_batch_size": 1,
    "input": [_INPUT_CONFIG],
    "output": [],
    "model_transaction_policy": {"decoupled": True},
}

_STATISTICS = statistics("model", {"success": {"count": 0, "ns": 0}}, 0)

_OF_TRITONS_MODEL = {
    "": Operation(
        "Triton", "Describe the model with its inputs and outputs",
        {200: (_JSON, TritonMetadata, {"name": "model", "versions": ["1"], "platform": "openvino", "inputs": [_INPUT],
                                  "outputs": [_OUTPUT]}), 404: _UNKNOWN_MODEL},
    ),
    "/ready": Operation(
        "Triton", "Report whether the model is ready for requests", {**_STATE, 404: _UNKNOWN_MODEL}
    ),
    "/stats": Operation(
        "Triton", "Show the counts and durations of the model's requests",
        {200: (_JSON, TritonStatistics, _STATISTICS), 404: _UNKNOWN_MODEL},
    ),
    "/config": Operation(
        "Triton", "Show the model's configuration",
        {200: (_JSON, TritonConfig, _CONFIG), 404: _UNKNOWN_MODEL},
    ),
}  # fmt: skip

_NO_SHARED_MEMORY = _failure(TRITON_ERRORS, TritonError, InvalidPayload("shared memory is not supported"))
_OF_TRITON: Operations = {
    ("GET", "/v2"): Operation(
        "Triton",
        "Describe the server with its version and extensions",
        {200: (_JSON, TritonServer, {"name": "lmi-handler", "version": __version__, "extensions": ["generate"]})},
    ),
    ("GET", "/v2/health/live"): Operation(
        "Triton", "Report that the server is running, whether or not the model is ready", {200: (_TEXT, str, "")}
    ),
    ("GET", "/v2/health/ready"): Operation("Triton", "Report whether the server is ready for requests", {**_STATE}),
    ("GET", "/v2/models/stats"): Operation(
        "Triton", "Show the counts and durations of all requests", {200: (_JSON, TritonStatistics, _STATISTICS)}
    ),
    **{
        (method, f"/v2/{kind}sharedmemory{path}"): Operation("Triton", f"{summary} of {kind} shared memory", responses)
        for kind in ("system", "cuda")
        for method, path, summary, responses in (
            ("GET", "/status", "Return the empty list of regions", {200: (_JSON, list[str], [])}),
            ("POST", "/region/{region}/register", "Refuse to register a region", {400: _NO_SHARED_MEMORY}),
            ("POST", "/unregister", "Accept the removal of all regions", {200: (_TEXT, str, "")}),
            ("POST", "/region/{region}/unregister", "Accept the removal of a region", {200: (_TEXT, str, "")}),
        )
    },
    ("POST", "/v2/repository/index"): Operation(
        "Triton",
        "List the model and its state",
        {200: (_JSON, list[TritonState], [{"name": "model", "version": "1", "state": "READY"}])},
    ),
    **{
        ("GET", f"/v2/models/{{model}}{version}{end}"): operation._replace(summary=operation.summary + by)
        for version, by in (("", ""), ("/versions/{version}", _OF_VERSION))
        for end, operation in _OF_TRITONS_MODEL.items()
    },
}

# -- vLLM's other routes -----------------------------------------------------------------------------------------------


_REFUSED = _failure(VLLM_ERRORS, VllmError, BadRequest("the adapter sql is not known"))
_MISSING = _failure(VLLM_ERRORS, VllmError, NotFound("The adapter sql was not found"))
_DOWN = _failure(VLLM_ERRORS, VllmError, Unavailable("the engine is not ready"))


def _change_of_adapter(verb: str, done: str, body: Shape) -> Operation:
    success = f"Success: LoRA adapter 'sql' {done} successfully."
    responses = {200: (_TEXT, str, success), 400: _REFUSED, 404: _MISSING, 503: _DOWN}
    return Operation(
        "vLLM", f"{verb} a LoRA adapter; needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=true", responses, body=body
    )


_OF_VLLM: Operations = {
    ("POST", "/detokenize"): Operation(
        "vLLM",
        "Decode token ids into text",
        {200: (_JSON, VllmText, {"prompt": "Hello", "content": "Hello"}), 400: _REFUSED},
        body=record({"tokens": listing(COUNT)}, {"model": TEXT}, example={"tokens": [28120]}),
    ),
    ("GET", "/version"): Operation(
        "vLLM",
        "Return vLLM's version if it is the engine, or else the server's version",
        {200: (_JSON, VllmVersion, {"version": "0.33.0"})},
    ),
    ("GET", "/tokenizer_info"): Operation(
        "vLLM",
        "Show the model's tokenizer_config.json; needs option.enable_tokenizer_info_endpoint=true",
        {
            200: (_JSON, dict[str, Any], {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}),
            404: _MISSING,
        },
    ),
    ("GET", "/load"): Operation("vLLM", "Count the requests in flight", {200: (_JSON, VllmLoad, {"server_load": 0})}),
    ("POST", "/v1/load_lora_adapter"): _change_of_adapter(
        "Register",
        "added",
        record(
            {"lora_name": TEXT, "lora_path": TEXT},
            {"load_inplace": FLAG, "is_3d_lora_weight": FLAG},
            example={"lora_name": "sql", "lora_path": "adapters/sql"},
        ),
    ),
    ("POST", "/v1/unload_lora_adapter"): _change_of_adapter(
        "Unregister", "removed", record({"lora_name": TEXT}, {"lora_int_id": COUNT}, example={"lora_name": "sql"})
    ),
}

_OF_LLAMA: Operations = {
    ("POST", "/apply-template"): Operation(
        "llama.cpp",
        "Apply the chat template",
        {200: (_JSON, LlamaPrompt, {"prompt": "Hello"})},
        body={
            **record({"messages": MESSAGES}, _OF_CHATS),
            "example": {"messages": [{"role": "user", "content": "Hello"}]},
        },
    ),
}

OPERATIONS: Operations = {
    **_OF_SERVER,
    **_OF_TGI,
    **_OF_RESPONSES,
    **_OF_BATCHES,
    **_OF_MESSAGE_BATCHES,
    **_OF_TRITON,
    **_OF_VLLM,
    **_OF_LLAMA,
}
"""Maps the method and path of a non-inference route to its operation."""
