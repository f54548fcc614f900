"""OpenAI's text completions and embeddings, with vLLM's and TGI's additions."""

from __future__ import annotations

import base64
import functools
import heapq
import struct
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON, SSE_DONE, Framing
from handler.core.media import MEDIA
from handler.core.values import (
    Delta,
    FieldNames,
    Finish,
    Pooling,
    Request,
    Sampling,
    Task,
    Token,
    Truncation,
    keep_last,
)
from handler.protocols.assistant.template import read_template
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.messages import MESSAGES, read_messages
from handler.protocols.kernel.parameters import Parameter, Table, read_all, read_sampled, request_shape, unsupported
from handler.protocols.kernel.readers import integer
from handler.protocols.kernel.reply import PromptOnly, Reply, SequenceOutput, VectorReply, Vectors, json_of
from handler.protocols.kernel.schema import Shape, accepts
from handler.protocols.kernel.texts import (
    VLLM_POOLING,
    Text,
    embedding_requests,
    read_texts,
    text_of,
    texts_shape,
    vllm_fields,
)
from handler.protocols.openai.api import (
    ERRORS,
    EmbeddingAnswer,
    OpenAiError,
    OpenAiTextAnswer,
    OpenAiTextChoice,
    OpenAiTextChunk,
    StopReason,
    TextLogprobs,
    TokenIds,
)
from handler.protocols.openai.request import (
    CHAT,
    COMPLETIONS,
    MODEL,
    OPENAI_NAMES,
    REASONS,
    STREAM,
    Choice,
    OpenAiDialect,
    OpenAiHead,
    Stream,
    Usage,
    WholeResponse,
    identity,
    names,
    read_stream,
    stop_reason,
    streaming,
)


class TextFormat(NamedTuple):
    """The options of text completions.

    Attributes:
        logprobs: the number of alternatives to each token, besides the chosen token. None means no log-probabilities.
        prompts: the text before the choices of each request: its prompt with `echo`, or else "".
        num_returned: the number of choices for each request.
        token_ids: whether each choice contains the ids of its new tokens, as in vLLM.
    """

    logprobs: int | None
    prompts: Sequence[str]
    num_returned: int = 1
    token_ids: bool = False

    def columns(self, prefill: Sequence[Token], tokens: Sequence[Token], at: int) -> TextLogprobs | None:
        """Render log-probabilities as columns, or return None if they are not requested.

        The first token of the prompt has neither a log-probability nor alternatives.

        Args:
            prefill: the tokens of the prompt, if they are shown.
            at: the offset, in characters, of the first token in the text of the choice.
        """
        if self.logprobs is None:
            return None
        offsets = []
        visible = [*prefill, *[token for token in tokens if token.id >= 0]]
        for token in visible:
            offsets.append(at)
            at += len(token.text)
        tops = [None] * len(prefill[:1]) + [self._top(token) for token in visible[len(prefill[:1]) :]]
        return {
            "tokens": [token.text for token in visible],
            "token_logprobs": [token.logprob for token in visible],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def ids(self, tokens: Sequence[Token]) -> TokenIds:
        """Return the field that contains the ids of a choice's new tokens, or {} if it is not requested."""
        return {"token_ids": [token.id for token in tokens if token.id >= 0]} if self.token_ids else {}

    def _top(self, token: Token) -> dict[str, float | None]:
        """Map the texts of a token and its alternatives to log-probabilities. If texts are equal, the first is used."""
        logprobs: dict[str, float | None] = {}
        for alternative in (*token.top, token):
            logprobs.setdefault(alternative.text, alternative.logprob)
        return logprobs


class TextChoice(Choice):
    def __init__(self, index: int, prompt: str) -> None:
        super().__init__(index)
        self.prompt = prompt
        self.at = 0  # the number of characters sent
        self.prefill: Sequence[Token] = ()  # the prompt's tokens, for the first chunk


class TextStream(Stream[TextChoice]):
    kind = "text_completion"

    def __init__(
        self,
        head: OpenAiHead,
        format: TextFormat,
        num_sequences: int,
        usage: Usage,
        framing: Framing = SSE_DONE,
        errors: ErrorFormat = ERRORS,
    ) -> None:
        prompts = [prompt for prompt in format.prompts for _ in range(num_sequences)]
        choices = [TextChoice(index, prompt) for index, prompt in enumerate(prompts)]
        super().__init__(head, choices, usage, len(format.prompts), framing, errors)
        self._format = format

    def _take(self, position: int, delta: Delta) -> None:
        super()._take(position, delta)
        self._choices[position].prefill = delta.prefill or ()

    @property
    def _is_plain(self) -> bool:
        return self._format.logprobs is None and not self._format.token_ids

    def _text_part(self, choice: TextChoice, text: str) -> OpenAiTextChoice:
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}

    def _part(self, choice: TextChoice, token: Token, finish: Finish | None) -> OpenAiTextChoice:
        prefill = () if choice.begun else choice.prefill
        text = token.text if choice.begun else choice.prompt + token.text
        at = choice.at if choice.begun or prefill else len(choice.prompt)
        choice.at += len(text)
        ended: StopReason = {}
        if finish is not None:
            ended["stop_reason"] = stop_reason(finish, choice.stop, token.id)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._format.columns(prefill, [token], at),
            "finish_reason": REASONS[finish],
            **self._format.ids([token]),
            **ended,
        }


class TextDocument(WholeResponse):
    """A non-streaming response with the choices for each prompt. `best_of` ranks them by mean log-probability."""

    def __init__(self, head: OpenAiHead, format: TextFormat, num_sequences: int, framing: Framing = JSON) -> None:
        super().__init__(head, len(format.prompts), num_sequences, framing)
        self._format = format
        self.num_repeated = sum(map(len, format.prompts)) * format.num_returned

    def _document(self) -> OpenAiTextAnswer:
        return {**self._head.value("text_completion"), "choices": self._choices(), "usage": self._usage()}

    def _choices(self) -> list[OpenAiTextChoice]:
        choices: list[OpenAiTextChoice] = []
        for number, prompt in enumerate(self._format.prompts):
            tries = self._sequences[number * self._each : (number + 1) * self._each]
            prefill = tries[0].prefill
            if self._format.num_returned < self._each:
                tries = heapq.nlargest(self._format.num_returned, tries, key=lambda sequence: sequence.mean_logprob)
            choices += [
                self._choice(len(choices) + index, prompt, sequence, prefill) for index, sequence in enumerate(tries)
            ]
        return choices

    def _choice(self, index: int, prompt: str, sequence: SequenceOutput, prefill: Sequence[Token]) -> OpenAiTextChoice:
        at = 0 if prefill else len(prompt)
        return {
            "index": index,
            "text": prompt + sequence.text,
            "logprobs": self._format.columns(prefill, sequence.tokens, at),
            "finish_reason": REASONS[sequence.finish],
            "stop_reason": stop_reason(sequence.finish, sequence.extras.stop, sequence.last_id),
            **self._format.ids(sequence.tokens),
        }


def completion_of(request: Request, head: OpenAiHead, *, streams: bool) -> Reply:
    """Return a reply that renders the response of any dialect as a text completion.

    The completion contains log-probabilities if `details` is requested, and the prompt if the full text is requested.
    """
    sampling = request.sampling
    format = TextFormat(1 if request.details else None, [request.text_before], sampling.n)
    if streams:
        return TextStream(head, format, sampling.num_sequences, Usage())
    return TextDocument(head, format, sampling.num_sequences)


MAX_PROMPTS = 256
MAX_SEQUENCES = 1024  # of all prompts together; with more, one client would block the engine

_MAX_TOKENS = 16  # the default of OpenAI and vLLM
_NAMES = OPENAI_NAMES._replace(prompt="prompt")
COMPLETION_EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 8}
"""The example body in the OpenAPI document for all completion dialects, without `model`."""


class OpenAiCompletions(OpenAiDialect):
    """The dialect of OpenAI's completions. Tokens are sampled unless `temperature` is 0.

    Subclasses change the fields and the framings (`lmi/asynchronous.py`), not the flow.

    Attributes:
        whole: the framing of non-streaming responses.
        stream: the framing of streams.
    """

    name = "openai_completions"
    needed = "a JSON object with 'prompt'"
    table = COMPLETIONS
    fields: Mapping[str, Shape] = {"prompt": texts_shape(MAX_PROMPTS), **MODEL, **STREAM}
    description = Description(
        title="OpenAI completions",
        request="OpenAiCompletionRequest",
        request_shape=request_shape(fields, table, "prompt"),
        error=OpenAiError,
        example={"model": "", **COMPLETION_EXAMPLE},
        response=OpenAiTextAnswer,
        chunk=OpenAiTextChunk,
        streams=(SSE_DONE.content_type,),
    )
    whole: Framing = JSON
    stream: Framing = SSE_DONE

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        model, adapter = self.read_model(body, context, request_context)
        prompts = read_texts(body.get("prompt"), "prompt", MAX_PROMPTS, "prompts")
        stream, usage = read_stream(body, context)
        prompt_only = body.get("max_tokens") == 0
        # Without new tokens, the engine need not support alternatives to them.
        able = _with_support_for(context, "top_logprobs") if prompt_only else context
        parameters = read_sampled(
            body, able, generation=context.generation, max_new_tokens=_MAX_TOKENS, table=self.table
        )
        ignored = self.ignored(body, context)
        sampling, echo = parameters.sampling, parameters.others.get("echo", False)
        logprobs = body.get("logprobs")
        _check(sampling, stream, prompt_only=prompt_only, echo=echo, scored=echo and logprobs is not None)
        if len(prompts) * sampling.num_sequences > MAX_SEQUENCES:
            most = MAX_SEQUENCES // len(prompts)
            cause = "best_of" if sampling.best_of > sampling.n else "n"
            raise InvalidParameter(
                f"{cause}={sampling.num_sequences}: must be at most {most} with {len(prompts)} prompts"
            )
        ranked = sampling.best_of > sampling.n
        sampling = sampling._replace(logprobs=logprobs is not None or ranked)
        if echo and logprobs is not None:
            sampling = _with_prompt_logprobs(sampling, logprobs, context)
        if prompt_only:  # the engines generate at least one token
            sampling = sampling._replace(max_new_tokens=1, logprobs=False, top_logprobs=0)
        requests = tuple(
            Request(
                text_of(prompt, "prompt", context),
                sampling,
                truncation=keep_last(parameters.others.get("truncate")),
                prompt_ids=None if isinstance(prompt, str) else prompt,
                adapter=adapter,
                priority=parameters.others.get("priority", 0),
                names=names(_NAMES, parameters),
            )
            for prompt in prompts
        )
        echoed = [request.prompt if echo else "" for request in requests]
        format = TextFormat(logprobs, echoed, sampling.n, token_ids=parameters.others.get("return_token_ids", False))
        head = OpenAiHead(*identity("cmpl"), model, context.fingerprint)
        reply: Reply = (
            TextStream(head, format, sampling.n, usage, self.stream, self.errors)
            if stream
            else TextDocument(head, format, sampling.num_sequences, self.whole)
        )
        if prompt_only:
            reply = PromptOnly(reply)
        if stream:
            return streaming(requests, reply, self.errors, ignored, self.stream)
        return ParsedRequest(requests, reply, self.errors, ignored)


def _check(sampling: Sampling, stream: bool, *, prompt_only: bool, echo: bool, scored: bool) -> None:
    """Refuse options that cannot be streamed, and options that contradict `max_tokens=0`."""
    n, best_of = sampling.n, sampling.best_of
    if stream and best_of > n:
        raise InvalidParameter(
            f"best_of={best_of}: must be n={n} when streaming: the best choices are only known at the end"
        )
    if stream and scored and n > 1:
        raise InvalidParameter(f"n={n}: must be 1 when streaming with echo and logprobs")
    if prompt_only:
        if not echo:
            raise InvalidParameter("max_tokens=0: needs echo=true, because the response would be empty")
        for name, value in {"n": n, "best_of": best_of}.items():
            if value > 1:
                raise InvalidParameter(f"{name}={value}: must be 1 with max_tokens=0: the response is only the prompt")


def _with_prompt_logprobs(sampling: Sampling, logprobs: int, context: ServerContext) -> Sampling:
    """Request the log-probabilities of the prompt tokens, with the same number of alternatives."""
    if reason := context.unsupported.get("prompt_logprobs"):
        raise InvalidParameter(f"echo=true: the engine {context.engine} does not support it with logprobs: {reason}")
    if logprobs and (reason := context.unsupported.get("prompt_top_logprobs")):
        raise InvalidParameter(
            f"logprobs={logprobs}: the engine {context.engine} does not support it with echo: {reason}"
        )
    return sampling._replace(prompt_logprobs=True, prompt_top_logprobs=logprobs)


def _with_support_for(context: ServerContext, field: str) -> ServerContext:
    """Return the context as if the engine supported `field`."""
    return replace(context, unsupported={name: reason for name, reason in context.unsupported.items() if name != field})


# -- embeddings at /v1/embeddings --------------------------------------------------------------------------------------
# With vLLM's additions (vllm/entrypoints/pooling/embed/protocol.py).


@accepts(enum=["float", "base64"])
def _encoding_format(value: Any) -> str:
    if value not in ("float", "base64"):
        raise ValueError("must be float or base64")
    return str(value)


_SHAPING = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class PoolingOptions(NamedTuple):
    """The options of a request for embeddings, labels or scores of texts.

    Attributes:
        model: the model name in the response.
        others: the values of parameters that are not fields of a request.
        fields: the fields that all requests share.
    """

    model: str
    others: Mapping[str, Any]
    fields: Mapping[str, Any]


class PooledDialect(OpenAiDialect):
    """Base class of the dialects that return embeddings, labels or scores of texts, with vLLM's pooling parameters.

    Attributes:
        truncation: the truncation of texts if the body sets none, or None to refuse texts that are too long.
        parameters_first: whether errors in parameters are reported before errors in texts.
    """

    truncation: Truncation | None = None
    parameters_first = False

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        model, adapter = self.read_model(body, context, request_context)
        texts = None if self.parameters_first else self.read_texts(body)
        parameters = read_all(body, context, defaults={}, table=self.table)
        if texts is None:
            texts = self.read_texts(body)
        ignored = self.ignored(body, context)
        fields = vllm_fields(parameters, adapter, self.truncation)
        requests, reply = self.pool(texts, PoolingOptions(model, parameters.others, fields), context)
        return ParsedRequest(requests, reply, self.errors, ignored)

    @abstractmethod
    def read_texts(self, body: Mapping[str, Any]) -> Any:
        """Return the texts in a request body in the form that `pool` takes."""

    @abstractmethod
    def pool(self, texts: Any, options: PoolingOptions, context: ServerContext) -> tuple[list[Request], VectorReply]:
        """Return the requests for the texts, and the reply."""


_CHAT_TEMPLATE = {
    **{name: CHAT.parameters[name] for name in ("add_special_tokens", "chat_template")},
    **{name: CHAT.parameters[name] for name in _SHAPING},
}
"""The parameters of a chat to embed, in place of those in `FOR_TEXTS`."""

FOR_TEXTS = {
    "add_special_tokens": unsupported("send token ids for a text without special tokens", True),
    "chat_template": unsupported("no chat template is applied to texts", {}),
    **dict.fromkeys(_SHAPING, unsupported("no chat template is applied to texts; send messages", False, {})),
}
"""The same parameters for texts in `input`."""


def _pooling(options: PoolingOptions, context: ServerContext) -> Pooling:
    classifies, others = context.task is Task.CLASSIFICATION, options.others
    normalize = others.get("normalize", classifies or context.config.normalize)
    return Pooling("classify" if classifies else "embed", others.get("dimensions"), normalize)


class InputDialect(PooledDialect):
    """Base class of the dialects that return an embedding or the label probabilities for each text in `input`, or for
    the chat in `messages`.
    """

    needed = "a JSON object with 'input' or 'messages'"
    fields: Mapping[str, Shape] = {"input": texts_shape(), "messages": MESSAGES, **MODEL}

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        if body.get("messages"):
            return self._read_chat(body, context, request_context)
        return super().read(body, context, request_context)

    def read_texts(self, body: Mapping[str, Any]) -> list[Text]:
        return read_texts(body.get("input"), "input")

    def pool(self, texts: Any, options: PoolingOptions, context: ServerContext) -> tuple[list[Request], VectorReply]:
        requests = embedding_requests(texts, "input", _pooling(options, context), context, **options.fields)
        return requests, self.reply(len(requests), options, context)

    def _read_chat(
        self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext
    ) -> ParsedRequest:
        """Parse a body with `messages`, whose rendered text is the only text, as in vLLM."""
        if body.get("input") is not None:
            raise InvalidPayload("'messages': send either 'input' or 'messages'")
        model, adapter = self.read_model(body, context, request_context)
        text_only = replace(context, no_media=dict.fromkeys(MEDIA, "the model reads text only"))
        messages, _, unknown = read_messages(body["messages"], text_only)
        parameters = read_all(body, context, defaults={}, table=self._chat_table())
        shaping = {"add_generation_prompt": False, **parameters.others}
        template, unread = read_template(shaping, messages, context)
        options = PoolingOptions(model, parameters.others, vllm_fields(parameters, adapter, self.truncation))
        request = Request(
            "",
            messages=messages,
            template=template,
            pooling=_pooling(options, context),
            names=FieldNames(prompt="messages"),
            **options.fields,
        )
        ignored = self.ignored(body, context, *unknown, *unread)
        return ParsedRequest([request], self.reply(1, options, context), self.errors, ignored)

    @classmethod
    @functools.cache
    def _chat_table(cls) -> Table:
        return Table({**cls.table.parameters, **_CHAT_TEMPLATE})

    @abstractmethod
    def reply(self, num_texts: int, options: PoolingOptions, context: ServerContext) -> VectorReply:
        """Return the reply that writes the embeddings or probabilities."""


class OpenAiEmbeddings(InputDialect):
    """The dialect of OpenAI's embeddings. It returns an embedding, by default of length 1, for each text in `input`."""

    name = "openai_embeddings"
    table = Table(
        {
            "dimensions": Parameter("dimensions", integer(1)),
            "encoding_format": Parameter("encoding_format", _encoding_format),
            **VLLM_POOLING,
            **FOR_TEXTS,
            "embed_dtype": unsupported("numbers always have 32 bits", "float32"),
            "endianness": unsupported("base64 is little-endian, as in OpenAI's API", "little", "native"),
            "media_io_kwargs": unsupported("the model reads text only", {}),
            "normalize": unsupported("send use_activation"),
            "lora_path": unsupported("send the adapter's name as model", "", []),
            "embed_overrides": unsupported("a text must be text or token ids", []),
            "embed_override_token_id": unsupported("a text must be text or token ids"),
        }
    )
    description = Description(
        title="OpenAI embeddings",
        request="OpenAiEmbeddingRequest",
        request_shape=request_shape(InputDialect.fields, table),
        error=OpenAiError,
        example={"model": "", "input": ["What is deep learning?"]},
        response=EmbeddingAnswer,
    )

    def reply(self, num_texts: int, options: PoolingOptions, context: ServerContext) -> VectorReply:
        def render(vectors: Vectors, num_tokens: int) -> EmbeddingAnswer:
            return {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": embedding}
                    for index, embedding in enumerate(vectors)
                ],
                "model": options.model,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }

        return VectorReply(num_texts, render, encoder_of(options.others))


def encoder_of(others: Mapping[str, Any]) -> Callable[[Sequence[float]], Any]:
    """Return the encoder of an embedding for the parameter `encoding_format`."""
    return _base64_of if others.get("encoding_format") == "base64" else json_of


def _base64_of(embedding: Sequence[float]) -> str:
    """Encode an embedding in base64 as OpenAI does, with little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()
