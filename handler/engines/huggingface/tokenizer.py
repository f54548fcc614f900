"""Tokenizers of Hugging Face model directories."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from handler.config import model_files
from handler.config.model_files import tokenizer_template
from handler.core.errors import ConfigError, InvalidPayload
from handler.core.media import MediaTokens
from handler.core.text import Prompt, Vocabulary, check_tokens, cut_after
from handler.core.values import PLAIN_TEMPLATE, Objects, TemplateOptions
from handler.engines.huggingface.media import media_tokens

Messages = list[dict[str, Any]]

_PROBE = "lmi handler probe"

NO_TEMPLATE = (
    "'messages': the model has no chat template; set option.chat_template, or send the prompt itself, as 'inputs' or "
    "as 'prompt' on /v1/completions"
)


def auto_tokenizer() -> Any:
    """Return transformers' class AutoTokenizer. Import it without the warning that models need PyTorch."""
    logging.getLogger("transformers").addFilter(_is_news)
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


class ContentForms(NamedTuple):
    """The types of message content that a chat template supports.

    Attributes:
        text: whether the content may be a string.
        parts: whether the content may be a list of parts.
        placeholders: maps a kind of media to the text that represents each medium if the content must be a string.
    """

    text: bool
    parts: bool
    placeholders: Mapping[str, str]

    def adapt(self, messages: Objects) -> Messages:
        """Convert the content of messages to a type that the template supports.

        If the content must be a string, each medium is replaced by a line with its placeholder before the text, as in
        vLLM.
        """
        return [{**message, "content": self._content(message["content"])} for message in messages]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return content if self.text or not self.parts else [{"type": "text", "text": content}]
        if self.parts or not isinstance(content, list):
            return content
        media = [self.placeholders[part["type"]] for part in content if part["type"] in self.placeholders]
        return "\n".join([*media, *(part["text"] for part in content if part["type"] == "text")])


def find_forms(
    render: Callable[[Messages], str], tokens: Mapping[str, MediaTokens], content_format: str = "auto"
) -> ContentForms:
    """Find out which types of content a template supports, by applying it to a message with each type.

    Args:
        render: function that applies the template, and raises an exception if the template fails.
        tokens: token counters for the kinds of media that the model accepts, by kind.
        content_format: `string` or `openai` to use that type, or `auto` to detect the supported types.
    """
    placeholders = {kind: kind_tokens.text for kind, kind_tokens in tokens.items()}
    if content_format != "auto":
        return ContentForms(content_format == "string", content_format == "openai", placeholders)
    text = _try(render, _PROBE)
    parts = _try(render, [{"type": "text", "text": _PROBE}])
    written = "'text'" in parts or '"text"' in parts  # the template has written the list itself as text
    return ContentForms(_PROBE in text, _PROBE in parts and not written, placeholders)


def last_text(message: Mapping[str, Any]) -> str:
    """Return a message's text, or the text of its last text part."""
    content = message["content"]
    if isinstance(content, list):
        return next((str(part["text"]) for part in reversed(content) if part["type"] == "text"), "")
    return str(content)


def rendered(render: Callable[[], str], messages: Objects, options: TemplateOptions) -> str:
    """Render a chat, and cut the text after the last message if the response continues that message.

    Raises:
        InvalidPayload: the template raises an exception for these messages.
        GenerationFailed: the template has a syntax error.
    """
    from handler.engines.huggingface.chat_template import render_error

    try:
        text = render()
    except Exception as error:  # whatever a template raises on a client's values
        raise render_error(error) from None
    return cut_after(text, last_text(messages[-1])) if options.continue_final_message else text


def _try(render: Callable[[Messages], str], content: Any) -> str:
    try:
        return render([{"role": "user", "content": content}])
    except Exception:  # a template's own error, of any kind
        return ""


_SAMPLE = "Hello world, 12 times\n  indented – ÿ😀"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
MOST_TOKENS = 1 << 20  # of a prompt; creating Python objects for more would hold the GIL too long
PART = 1 << 20  # characters of a part of a long text
_SPACE = "▁"  # SentencePiece's space


class HfTokenizer:
    """A tokenizer based on transformers. See `engines.base.Tokenizer`. `encode` runs in Rust and can run concurrently.

    Args:
        model: a directory with tokenizer.json, or with files that transformers can convert to it.
        trust_remote_code: whether to run tokenizer code from the model's directory.
        chat_template: template that replaces the model's own.
        content_format: value of option.chat_template_content_format.

    Raises:
        ConfigError: the vocabulary cannot be converted to bytes, or tokenizer.json is missing and cannot be created.
    """

    def __init__(
        self,
        model: Path,
        *,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        content_format: str = "auto",
    ) -> None:
        self._tokenizer = auto_tokenizer().from_pretrained(str(model), trust_remote_code=trust_remote_code)
        if not self._tokenizer.is_fast:
            raise ConfigError(f"the tokenizer of {model} has no fast version (tokenizer.json)")
        self._tokenizer.chat_template = chat_template or tokenizer_template(self._tokenizer.chat_template, model)
        self._fast = self._tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocabulary = _vocabulary(self._tokenizer)
        template = self._tokenizer.chat_template or ""
        # If there are several templates, transformers uses the template named `tool_use` for tools.
        self.chat_template = template if isinstance(template, str) else "\n".join(template.values())
        self.media_tokens: Mapping[str, MediaTokens] = media_tokens(model)
        self._forms: ContentForms | None = None
        if self.chat_template and (self.media_tokens or content_format != "auto"):
            self._forms = find_forms(self._render, self.media_tokens, content_format)

    def encode(self, text: str) -> Prompt:
        return self._encode(text, "inputs", add_special_tokens=True)

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        """Apply the chat template and encode the result, as transformers and vLLM do (docs/wire/openai.md).

        Raises:
            InvalidPayload: the model has no chat template, or the template raises an exception for these messages.
            GenerationFailed: the template has a syntax error.
        """
        if not self._tokenizer.chat_template:
            raise InvalidPayload(NO_TEMPLATE)

        def render() -> str:
            return self._render(
                [dict(message) for message in messages] if self._forms is None else self._forms.adapt(messages),
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=options.add_generation_prompt,
                **dict(options.arguments),
            )

        return self._encode(rendered(render, messages, options), "messages", add_special_tokens=False)

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _encode(self, text: str, name: str, *, add_special_tokens: bool) -> Prompt:
        check_tokens(text, name, MOST_TOKENS, PART, lambda part: len(self.ids(part)))
        return Prompt(text, self.ids(text, add_special_tokens=add_special_tokens), self.vocabulary)

    def ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a text as a batch of size 1, as `encode` would hold the GIL, e.g. for 0.2 s with 50,000 tokens."""
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def _vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the bytes of each token id. Raise ConfigError if they do not match what the tokenizer itself decodes.

    Byte-level BPE represents each byte by a character. SentencePiece uses a special character for spaces, and
    represents single bytes as `<0x0A>`. In both, an added token represents its own text.
    """
    by_id = {id: piece for piece, id in tokenizer.get_vocab().items()}
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
    read = _byte_level if _is_byte_level(by_id.values()) else sentence_piece
    pieces = [
        added[id].encode() if id in added else read(by_id[id]) if id in by_id else b""
        for id in range(max((*by_id, *added)) + 1)
    ]
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    encoded = tokenizer.backend_tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
    ids = [id for id in encoded if id not in added]  # `tokenizers` decodes an added token such as `ÿ` as a byte
    expected = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    vocabulary = Vocabulary(pieces, special)
    text = vocabulary.decode(ids)
    if expected not in (text, text.removeprefix(" ")):  # SentencePiece removes the space that it added in front
        raise ConfigError("this type of tokenizer is not supported: its vocabulary cannot be converted to bytes")
    return vocabulary


def _is_byte_level(pieces: Any) -> bool:
    alphabet = set(_LETTERS)
    return alphabet <= {piece for piece in pieces if len(piece) == 1} or not any(_SPACE in piece for piece in pieces)


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a token. A token with another character represents its own text, as in `tokenizers`."""
    if all(letter in _LETTERS for letter in piece):
        return bytes(_LETTERS[letter] for letter in piece)
    return piece.encode()


def sentence_piece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _letters() -> dict[str, int]:
    """Map GPT-2's characters to bytes.

    Printable Latin-1 characters are mapped to their own bytes, and characters from code point 256 on to all other
    bytes.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


_LETTERS = _letters()


# -- Mistral's own tokenizer (tekken.json, or tokenizer.model.v3) and chat format, through mistral_common --------------


_FILES = ("tekken.json", "tokenizer.model.v*", "tokenizer.mm.model.v*")
_EOS = 2
_CALL_ID = 9  # characters; mistral_common requires this length, and vLLM keeps the last 9


def tokenizer_file(model: Path) -> Path | None:
    """Return the file of a tokenizer in Mistral's own format, or None if the directory has none."""
    paths = (path for pattern in _FILES for path in reversed(model_files.visible(model, pattern)))
    return next(paths, None)


def mistral_eos_id(model: Path) -> int | None:
    """Return the id of the EOS token in tekken.json, or None if there is no such file."""
    file = model / "tekken.json"
    if not file.is_file():
        return None
    tokens = model_files.read_json(file).get("special_tokens") or ()  # early files do not list the usual tokens
    return next((int(token["rank"]) for token in tokens if token["token_str"] == "</s>"), _EOS)


class MistralTokenizer:
    """A tokenizer based on mistral_common. See `engines.base.Tokenizer`.

    As in vLLM, special tokens in a client's text are encoded as plain text.

    Args:
        model: a directory with a tokenizer in Mistral's own format.

    Raises:
        ConfigError: the directory has no such tokenizer, or mistral_common is missing.
    """

    media_tokens: Mapping[str, MediaTokens] = {}

    def __init__(self, model: Path) -> None:
        file = tokenizer_file(model)
        if file is None:
            raise ConfigError(f"option.tokenizer_mode=mistral: {model} has none of {', '.join(_FILES)}")
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Common
        except ModuleNotFoundError:
            raise ConfigError("option.tokenizer_mode=mistral needs: pip install mistral-common") from None
        # This mode is meant for servers: the last message may be the assistant's.
        self._chats = Common.from_file(str(file), mode=ValidationMode.test)
        self._texts = self._chats.instruct_tokenizer.tokenizer
        ids = range(self._texts.n_words)
        special = {id for id in ids if self._texts.is_special(id)}
        if file.suffix == ".json":
            pieces = [self._texts.id_to_byte_piece(id, SpecialTokenPolicy.KEEP) for id in ids]
        else:
            names = map(self._texts.id_to_piece, ids)
            pieces = [name.encode() if id in special else sentence_piece(name) for id, name in enumerate(names)]
        self.vocabulary = Vocabulary(pieces, special)
        markers = sorted(self.vocabulary.marks)
        # There is no template. In this text, the parsers of tool calls and reasoning find the markers of the model.
        self.chat_template = " ".join([*markers, *(["tools", "tool_calls"] if "[AVAILABLE_TOOLS]" in markers else [])])

    def encode(self, text: str) -> Prompt:
        check_tokens(text, "inputs", MOST_TOKENS, PART, self._count)
        return Prompt(text, self._texts.encode(text, bos=True, eos=False), self.vocabulary)

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        """Encode the messages with mistral_common.

        Raises:
            InvalidPayload: mistral_common refuses the messages, or a message contains anything but text.
        """
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        chat = [_message(message) for message in messages]
        for text in (str(message.get("content") or "") for message in chat):
            check_tokens(text, "messages", MOST_TOKENS, PART, self._count)
        continues = options.continue_final_message
        try:
            request = ChatCompletionRequest.from_openai(
                chat, tools=[dict(tool) for tool in tools] or None, continue_final_message=continues
            )
            encoded = self._chats.encode_chat_completion(request)
        except Exception as error:  # of its own classes or pydantic's, because of a client's values
            raise InvalidPayload(f"'messages': Mistral's tokenizer refuses them: {str(error)[:400]}") from None
        return Prompt(self.vocabulary.decode(encoded.tokens), encoded.tokens, self.vocabulary)

    def _count(self, text: str) -> int:
        return len(self._texts.encode(text, bos=False, eos=False))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to mistral_common's format: text only, and tool calls with short ids and JSON arguments."""
    result = dict(message)
    if isinstance(parts := result.get("content"), list):
        if any(part["type"] != "text" for part in parts):
            raise InvalidPayload("'messages': option.tokenizer_mode=mistral accepts text only")
        result["content"] = "\n".join([part["text"] for part in parts])
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [_call(call) for call in calls]
    if identifier := result.get("tool_call_id"):
        result["tool_call_id"] = identifier[-_CALL_ID:]
    return result


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    value = function["arguments"]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return {**call, "id": str(call.get("id", ""))[-_CALL_ID:], "function": {**function, "arguments": text}}
