"""Mistral's own tokenizer (tekken.json, or tokenizer.model.v3) and its form of chats, by mistral_common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handler.config import model_files
from handler.core.errors import ConfigError, InvalidPayload
from handler.core.media import MediaTokens
from handler.core.text import Prompt, Vocabulary, check_tokens
from handler.core.values import PLAIN_TEMPLATE, TemplateOptions
from handler.engines.huggingface.tokenizer import MOST_TOKENS, PART, sentence_piece

_FILES = ("tekken.json", "tokenizer.model.v*", "tokenizer.mm.model.v*")
_EOS = 2
_CALL_ID = 9  # characters; mistral_common takes no others, and vLLM keeps the last ones


def tokenizer_file(model: Path) -> Path | None:
    """Return the file of Mistral's own tokenizer; None where the directory has none."""
    found = (path for pattern in _FILES for path in reversed(model_files.visible(model, pattern)))
    return next(found, None)


def mistral_eos_id(model: Path) -> int | None:
    """Return the id of the EOS in tekken.json; None where there is no such file."""
    file = model / "tekken.json"
    if not file.is_file():
        return None
    marks = model_files.read_json(file).get("special_tokens") or ()  # early files leave the usual ones out
    return next((int(mark["rank"]) for mark in marks if mark["token_str"] == "</s>"), _EOS)


class MistralTokenizer:
    """See `engines.base.Tokenizer`. As in vLLM, marks in a client's text are text.

    Args:
        model: a directory with a tokenizer of Mistral's own.

    Raises:
        ConfigError: there is none, or mistral_common is missing or cannot read it.
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
            raise ConfigError(
                "option.tokenizer_mode=mistral needs mistral_common: pip install mistral-common"
            ) from None
        # The mode of servers: the last message may be the assistant's.
        self._chats = Common.from_file(str(file), mode=ValidationMode.test)
        self._texts = self._chats.instruct_tokenizer.tokenizer
        ids = range(self._texts.n_words)
        special = {id for id in ids if self._texts.is_special(id)}
        if file.suffix == ".json":
            pieces = [self._texts.id_to_byte_piece(id, SpecialTokenPolicy.KEEP) for id in ids]
        else:
            named = map(self._texts.id_to_piece, ids)
            pieces = [name.encode() if id in special else sentence_piece(name) for id, name in enumerate(named)]
        self.vocabulary: Vocabulary | None
        self.vocabulary = self._vocabulary = Vocabulary(pieces, special)
        marks = sorted(self._vocabulary.marks)
        # There is no template: parsers of tool calls and reasoning find the marks that the model knows.
        self.chat_template = " ".join([*marks, *(["tools", "tool_calls"] if "[AVAILABLE_TOOLS]" in marks else [])])

    def encode(self, text: str) -> Prompt:
        check_tokens(
            text, "inputs", MOST_TOKENS, PART, lambda part: len(self._texts.encode(part, bos=False, eos=False))
        )
        return Prompt(text, self._texts.encode(text, bos=True, eos=False), self._vocabulary)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN_TEMPLATE,
    ) -> Prompt:
        """Lay the messages out as mistral_common does.

        Raises:
            InvalidPayload: it refuses them, or a message has more than text.
        """
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        given = [_message(message) for message in messages]
        for text in (str(message.get("content") or "") for message in given):
            check_tokens(
                text, "messages", MOST_TOKENS, PART, lambda part: len(self._texts.encode(part, bos=False, eos=False))
            )
        continues = options.continue_final_message
        try:
            request = ChatCompletionRequest.from_openai(
                given, tools=[dict(tool) for tool in tools] or None, continue_final_message=continues
            )
            encoded = self._chats.encode_chat_completion(request)
        except Exception as error:  # its own classes and pydantic's, on a client's values
            raise InvalidPayload(f"'messages': Mistral's tokenizer refuses them: {str(error)[:400]}") from None
        return Prompt(self._vocabulary.decode(encoded.tokens), encoded.tokens, self._vocabulary)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in mistral_common's form: text alone, short ids of calls, arguments as JSON."""
    made = dict(message)
    if isinstance(parts := made.get("content"), list):
        if any(part["type"] != "text" for part in parts):
            raise InvalidPayload("'messages': option.tokenizer_mode=mistral takes text alone")
        made["content"] = "\n".join([part["text"] for part in parts])
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
    if identifier := made.get("tool_call_id"):
        made["tool_call_id"] = identifier[-_CALL_ID:]
    return made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function["arguments"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "id": str(call.get("id", ""))[-_CALL_ID:], "function": {**function, "arguments": text}}
