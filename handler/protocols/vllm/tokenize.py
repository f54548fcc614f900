"""vLLM's /tokenize and /detokenize (vllm/entrypoints/serve/tokenize/protocol.py)."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.framing import JSON, Framing
from handler.core.text import Prompt
from handler.core.values import FieldNames, Request
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import ParsedRequest, prompt_request
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.parameters import Parameter, Table, read_all
from handler.protocols.kernel.readers import boolean
from handler.protocols.kernel.reply import PreparedDocument, list_parts
from handler.protocols.kernel.schema import COUNT, Shape, listing
from handler.protocols.kernel.texts import NON_EMPTY, read_list, read_string
from handler.protocols.openai.chat import OpenAiChat, ParsedChat
from handler.protocols.openai.request import CHAT, MODEL, OpenAiDialect, Usage
from handler.protocols.vllm.api import ERRORS, VllmText

MAX_IDS = 1 << 20
"""The maximum number of token ids in a request to /detokenize."""

_SHAPING = (
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
)  # fmt: skip
"""The parameters of vLLM's /tokenize that change the prompt of a chat."""

_SPECIAL, _STRINGS = "add_special_tokens", "return_token_strs"
_WITH_STRINGS = {_STRINGS: Parameter("", boolean)}


class VllmTokenize(OpenAiDialect):
    """The dialect of /tokenize for a prompt."""

    name = "vllm_tokenize"
    computes = generates = False
    errors = ERRORS
    needed = "a JSON object with 'prompt'"
    table = Table({_SPECIAL: Parameter("", boolean), **_WITH_STRINGS})
    fields: Mapping[str, Shape] = {"prompt": NON_EMPTY, **MODEL}

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        self.read_model(body, context, request_context)
        prompt = read_string(body.get("prompt"), "prompt")
        read_all(body, context, defaults={}, table=self.table)
        edit = without_special if body.get(_SPECIAL) is False else None
        request = Request(prompt, names=FieldNames(prompt="prompt"), edit=edit)
        return prompt_request(request, _tokens_of(body, context), self.errors, self.unknown(body, context))


def without_special(request: Request, encode: Callable[[Request], Prompt]) -> tuple[Request, Prompt]:
    """Tokenize a text without the special tokens that the tokenizer adds at the ends. This is an `edit`."""
    prompt = encode(request)
    letter, special = encode(request._replace(prompt="a")).ids, prompt.vocabulary.special
    start, end = (sum(1 for _ in takewhile(special.__contains__, ids)) for ids in (letter, reversed(letter)))
    return request, prompt._replace(ids=prompt.ids[start : len(prompt.ids) - end])


class RenderedChat(OpenAiChat):
    """A dialect whose response is a chat's prompt. It is the same as on /v1/chat/completions, including tools."""

    computes = generates = False
    errors: ErrorFormat = ERRORS
    table = Table({name: CHAT.parameters[name] for name in _SHAPING})
    fields: Mapping[str, Shape] = {name: OpenAiChat.fields[name] for name in ("messages", "model", "tools")}

    @abstractmethod
    def render(self, body: Mapping[str, Any], context: ServerContext) -> Callable[[Prompt], Iterator[bytes]]:
        """Return a function that yields the JSON of the response."""

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        known = {
            name: value for name, value in body.items() if name in self._known() and (name, value) != ("tools", [])
        }
        parsed = super().read(known, context, request_context)
        ignored = [*parsed.ignored, *self.unknown(body, context)]
        return prompt_request(parsed.requests[0], self.render(body, context), self.errors, ignored)

    def read_framing(self, body: Mapping[str, Any], context: ServerContext) -> tuple[Framing, Usage]:
        return JSON, Usage()

    def respond(self, chat: ParsedChat) -> ParsedRequest:
        return ParsedRequest((chat.request,), PreparedDocument(b""), self.errors, chat.ignored)


class VllmTokenizeChat(RenderedChat):
    """The dialect of /tokenize for a chat."""

    name = "vllm_tokenize_chat"
    table = Table({**RenderedChat.table.parameters, **_WITH_STRINGS})

    def render(self, body: Mapping[str, Any], context: ServerContext) -> Callable[[Prompt], Iterator[bytes]]:
        return _tokens_of(body, context)


class VllmDetokenize(OpenAiDialect):
    """The dialect of /detokenize, which decodes token ids, including those of special tokens.

    vLLM and llama-server read the same requests. The response has the text as vLLM's `prompt` and as llama-server's
    `content`.
    """

    name = "vllm_detokenize"
    computes = generates = False
    errors = ERRORS
    needed = "a JSON object with 'tokens'"
    table = Table({})
    fields: Mapping[str, Shape] = {"tokens": listing(COUNT), **MODEL}

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        self.read_model(body, context, request_context)
        decoded = _text_of(body.get("tokens"), context)
        text: VllmText = {"prompt": decoded, "content": decoded}
        return ParsedRequest((), PreparedDocument(JSON.encode(text)), self.errors, self.unknown(body, context))


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
    return functools.partial(_render, strings=body.get(_STRINGS) is True, most=context.most_tokens())


def _render(prompt: Prompt, *, strings: bool, most: int | None) -> Iterator[bytes]:
    yield b'{"count":' + JSON.encode(len(prompt.ids)) + b',"max_model_len":' + JSON.encode(most) + b',"tokens":'
    yield from list_parts(prompt.ids)
    yield b',"token_strs":'
    yield from list_parts(map(prompt.vocabulary.text, prompt.ids)) if strings else (b"null",)
    yield b"}"
