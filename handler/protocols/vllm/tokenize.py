"""vLLM's /tokenize and /detokenize (vllm/entrypoints/serve/tokenize/protocol.py)."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.framing import JSON, Framing
from handler.core.text import Prompt
from handler.core.values import FieldNames, Request
from handler.protocols.kernel.body import PYDANTIC, relaxed_by, report_unknown
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Dialect, ParsedRequest, prompt_request
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.parameters import Table
from handler.protocols.kernel.readers import NamedValue, boolean
from handler.protocols.kernel.reply import PreparedDocument, list_parts
from handler.protocols.kernel.schema import COUNT, FLAG, Shape, listing
from handler.protocols.kernel.texts import read_list
from handler.protocols.openai.chat import OpenAiChat, ParsedChat
from handler.protocols.openai.request import CHAT, HARMLESS, Usage, read_model
from handler.protocols.vllm.api import ERRORS, VllmText

MAX_IDS = 1 << 20
"""The maximum number of token ids in a request to /detokenize."""

_SHAPING = (
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
)  # fmt: skip
"""The parameters of vLLM's /tokenize that change the prompt of a chat."""

_SPECIAL, _STRINGS = "add_special_tokens", "return_token_strs"
_relax = relaxed_by(PYDANTIC, {_SPECIAL: FLAG, _STRINGS: FLAG, "tokens": listing(COUNT)})


def _unknown(body: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """List the unknown fields of the body. Null fields count as absent."""
    return [name for name, value in body.items() if value is not None and name not in read and name not in HARMLESS]


class VllmTokenize(Dialect):
    """The dialect of /tokenize for a prompt."""

    name = "vllm_tokenize"
    computes = False
    errors = ERRORS
    fields = frozenset({"model", "prompt", _SPECIAL, _STRINGS})

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        body = _relax(body)
        read_model(body, context, request_context)
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise InvalidPayload("'prompt' must be a non-empty string")
        edit = without_special if NamedValue(_SPECIAL, body.get(_SPECIAL)).optional(boolean) is False else None
        render = _tokens_of(body, context)
        ignored = report_unknown(_unknown(body, self.fields), body, context, generates=False)
        request = Request(prompt, names=FieldNames(prompt="prompt"), edit=edit)
        return prompt_request(request, render, self.errors, ignored)


def without_special(request: Request, encode: Callable[[Request], Prompt]) -> tuple[Request, Prompt]:
    """Tokenize a text without the special tokens that the tokenizer adds at the ends. This is an `edit`."""
    prompt = encode(request)
    letter, special = encode(request._replace(prompt="a")).ids, prompt.vocabulary.special
    start, end = (sum(1 for _ in takewhile(special.__contains__, ids)) for ids in (letter, reversed(letter)))
    return request, prompt._replace(ids=prompt.ids[start : len(prompt.ids) - end])


class RenderedChat(OpenAiChat):
    """A dialect whose response is a chat's prompt. It is the same as on /v1/chat/completions, including tools."""

    computes = False
    errors: ErrorFormat = ERRORS
    table = Table({name: CHAT.parameters[name] for name in _SHAPING})
    fields: Mapping[str, Shape] = {name: OpenAiChat.fields[name] for name in ("messages", "model", "tools")}
    others = frozenset[str]()
    """Fields that only the rendering reads."""

    @abstractmethod
    def render(self, body: Mapping[str, Any], context: ServerContext) -> Callable[[Prompt], Iterator[bytes]]:
        """Return a function that yields the JSON of the response."""

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        read = self.fields.keys() | self.table.parameters.keys()
        body = _relax(body)
        fields = {name: value for name, value in body.items() if name in read and (name, value) != ("tools", [])}
        parsed = super().parse(fields, context, request_context)
        render = self.render(body, context)
        unknown = report_unknown(_unknown(body, {*read, *self.others}), body, context, generates=False)
        return prompt_request(parsed.requests[0], render, self.errors, [*parsed.ignored, *unknown])

    def read_framing(self, body: Mapping[str, Any], context: ServerContext) -> tuple[Framing, Usage]:
        return JSON, Usage()

    def respond(self, chat: ParsedChat) -> ParsedRequest:
        return ParsedRequest((chat.request,), PreparedDocument(b""), self.errors, chat.ignored)


class VllmTokenizeChat(RenderedChat):
    """The dialect of /tokenize for a chat."""

    name = "vllm_tokenize_chat"
    others = frozenset({_STRINGS})

    def render(self, body: Mapping[str, Any], context: ServerContext) -> Callable[[Prompt], Iterator[bytes]]:
        return _tokens_of(body, context)


class VllmDetokenize(Dialect):
    """The dialect of /detokenize, which decodes token ids, including those of special tokens.

    vLLM and llama-server read the same requests. The response has the text as vLLM's `prompt` and as llama-server's
    `content`.
    """

    name = "vllm_detokenize"
    computes = False
    errors = ERRORS

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'tokens'")
        body = _relax(body)
        read_model(body, context, request_context)
        decoded = _text_of(body.get("tokens"), context)
        text: VllmText = {"prompt": decoded, "content": decoded}
        ignored = report_unknown(_unknown(body, {"model", "tokens"}), body, context, generates=False)
        return ParsedRequest((), PreparedDocument(JSON.encode(text)), self.errors, ignored)


TOKENIZE, TOKENIZE_CHAT, DETOKENIZE = VllmTokenize(), VllmTokenizeChat(), VllmDetokenize()


def _text_of(value: Any, context: ServerContext) -> str:
    expected = "must be a list of token ids"
    ids: Sequence[Any] = value if value == [] else read_list(value, "tokens", expected, MAX_IDS, "ids")
    if (vocabulary := context.vocabulary) is None:
        raise InvalidPayload("'tokens': the engine has no vocabulary to decode them")
    for index, id in enumerate(ids):
        if type(id) is not int or not 0 <= id < len(vocabulary):
            raise InvalidPayload(f"'tokens[{index}]' must be a token id from 0 to {len(vocabulary) - 1}")
    return vocabulary.decode(ids)


def _tokens_of(body: Mapping[str, Any], context: ServerContext) -> functools.partial[Iterator[bytes]]:
    strings = NamedValue(_STRINGS, body.get(_STRINGS)).optional(boolean)
    return functools.partial(_render, strings=bool(strings), most=context.most_tokens())


def _render(prompt: Prompt, *, strings: bool, most: int | None) -> Iterator[bytes]:
    yield b'{"count":' + JSON.encode(len(prompt.ids)) + b',"max_model_len":' + JSON.encode(most) + b',"tokens":'
    yield from list_parts(prompt.ids)
    yield b',"token_strs":'
    yield from list_parts(map(prompt.vocabulary.text, prompt.ids)) if strings else (b"null",)
    yield b"}"
