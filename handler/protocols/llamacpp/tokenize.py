"""The dialects of llama-server's /tokenize and /apply-template (tools/server/server-context.cpp, b11434).

The dialect of /detokenize is in `vllm/tokenize.py`, because llama-server and vLLM use the same requests for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON
from handler.core.text import Prompt
from handler.core.values import FieldNames, Request
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import ParsedRequest, prompt_request
from handler.protocols.kernel.parameters import Parameter, Table, read_all
from handler.protocols.kernel.readers import boolean
from handler.protocols.kernel.reply import PreparedDocument, list_parts
from handler.protocols.kernel.schema import TEXT, Count, Shape
from handler.protocols.openai.api import ERRORS
from handler.protocols.openai.request import MODEL, OpenAiDialect
from handler.protocols.vllm.tokenize import RenderedChat, without_special

FLAGS = {"add_special": False, "parse_special": True, "with_pieces": False}
"""Maps each flag of /tokenize to its default."""


class LlamaPiece(TypedDict):
    """A token in a response. `piece` is its text, or a list of its bytes if it ends in the middle of a character."""

    id: Count
    piece: str | list[Count]


class LlamaTokens(TypedDict):
    """The tokens of a text, with their pieces if requested."""

    tokens: list[Count] | list[LlamaPiece]


class LlamaPrompt(TypedDict):
    prompt: str


class LlamaTokenize(OpenAiDialect):
    """The dialect of /tokenize for `content`."""

    name = "llamacpp_tokenize"
    computes = generates = False
    needed = "a JSON object with 'content'"
    table = Table({name: Parameter(name, boolean) for name in FLAGS})
    fields: Mapping[str, Shape] = {"content": TEXT, **MODEL}

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        self.read_model(body, context, request_context)
        flags = {**FLAGS, **read_all(body, context, defaults={}, table=self.table).others}
        content = body.get("content")
        if not isinstance(content, str):
            raise InvalidPayload("'content' must be a string")
        ignored = self.unknown(body, context)
        if not content:
            return ParsedRequest((), PreparedDocument(b'{"tokens":[]}'), self.errors, ignored)
        edit = functools.partial(_tokens_of, flags=flags)
        request = Request(content, names=FieldNames(prompt="content"), edit=edit)
        return prompt_request(request, functools.partial(_render, pieces=flags["with_pieces"]), self.errors, ignored)


class LlamaTemplate(RenderedChat):
    """The dialect of /apply-template."""

    name = "llamacpp_template"
    errors = ERRORS

    def render(self, body: Mapping[str, Any], context: ServerContext) -> Callable[[Prompt], Iterator[bytes]]:
        return lambda prompt: iter([JSON.encode(LlamaPrompt(prompt=prompt.text))])


TOKENIZE, APPLY_TEMPLATE = LlamaTokenize(), LlamaTemplate()


def _tokens_of(
    request: Request, encode: Callable[[Request], Prompt], *, flags: Mapping[str, bool]
) -> tuple[Request, Prompt]:
    """Tokenize a text. Without `add_special`, remove the special tokens that the tokenizer has added at the ends."""
    prompt = encode(request)
    texts = () if flags["parse_special"] else [text for text in prompt.vocabulary.marks if text in request.prompt]
    if texts:
        raise InvalidParameter(
            f"parse_special=false is not supported for 'content' with the text of a special token ({texts[0]!r}): this "
            "server always reads it as that token"
        )
    return (request, prompt) if flags["add_special"] else without_special(request, encode)


def _render(prompt: Prompt, *, pieces: bool) -> Iterator[bytes]:
    yield b'{"tokens":'
    yield from list_parts(map(functools.partial(_piece, prompt), prompt.ids) if pieces else prompt.ids)
    yield b"}"


def _piece(prompt: Prompt, id: int) -> LlamaPiece:
    text = prompt.vocabulary.texts[id]
    return {"id": id, "piece": list(prompt.vocabulary.pieces[id]) if text is None else text}
