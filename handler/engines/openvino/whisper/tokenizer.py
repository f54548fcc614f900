"""The prompt of a transcription: what Whisper's decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config import model_files
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload
from handler.core.media import MediaTokens
from handler.core.text import Prompt, Vocabulary
from handler.core.values import PLAIN_TEMPLATE, TemplateOptions

_GENERATION = "generation_config.json"


class StartToken(NamedTuple):
    """A clip has one token: the one with which its transcript starts."""

    placeholder: int
    text: str = "<|startoftranscript|>"

    def count(self, size: Sequence[int]) -> int:
        return 1


class WhisperIds(NamedTuple):
    """Ids of what a prompt asks for; `languages` and `tasks` are empty where the model knows English alone."""

    start: int
    previous: int | None
    no_timestamps: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    most_previous: int  # tokens of a client's prompt


def whisper_ids(model: Path) -> WhisperIds:
    """Read generation_config.json.

    Raises:
        ConfigError: it lacks one of them.
    """
    found = model_files.read_json(model / _GENERATION)
    numbers = [found.get(name) for name in ("decoder_start_token_id", "no_timestamps_token_id")]
    start, no_timestamps = numbers
    if not isinstance(start, int) or not isinstance(no_timestamps, int):
        raise ConfigError(f"{model / _GENERATION} lacks decoder_start_token_id or no_timestamps_token_id: no Whisper's")
    named: dict[str, Mapping[str, int]] = {}
    for name in ("lang_to_id", "task_to_id"):
        value = found.get(name)
        named[name] = value if found.get("is_multilingual") and isinstance(value, dict) else {}
    languages = {name.strip("<|>"): id for name, id in named["lang_to_id"].items()}
    positions = model_files.read_json(model / "config.json").get("max_target_positions", 448)
    previous = found.get("prev_sot_token_id")
    return WhisperIds(start, previous, no_timestamps, languages, named["task_to_id"], positions // 2 - 1)


class WhisperTokenizer:
    """See `engines.base.Tokenizer`. Messages are a clip; the options' arguments name language, task and prompt."""

    chat_template = ""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any, ids: WhisperIds) -> None:
        self.vocabulary: Vocabulary | None
        self.vocabulary = self._vocabulary = vocabulary
        self._tokenizer, self._ids = tokenizer, ids
        self.media_tokens: Mapping[str, MediaTokens] = {"audio": StartToken(ids.start)}

    def encode(self, text: str) -> Prompt:
        return Prompt(text, self._encode(text), self._vocabulary)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN_TEMPLATE,
    ) -> Prompt:
        asked = dict(options.arguments)
        ids = [*self._previous(asked.get("prompt", "")), self._ids.start, *self._wanted(**asked)]
        return Prompt("", [*ids, self._ids.no_timestamps], self._vocabulary)

    def _previous(self, text: str) -> list[int]:
        if not text:
            return []
        if self._ids.previous is None:
            raise InvalidPayload("'prompt' is not supported: the model has no prev_sot_token_id")
        # A token has a byte at least; the tokenizer would hold the GIL for as long as a text takes.
        most = self._ids.most_previous
        ids = self._encode(" " + text.strip()) if len(text) <= 64 * most else [0] * len(text)
        if len(ids) > most:
            raise InvalidPayload(f"'prompt' is too long: at most {most} tokens fit beside a transcript")
        return [self._ids.previous, *ids]

    def _wanted(self, task: str = "transcribe", language: str = "", **_: Any) -> list[int]:
        known = self._ids.languages
        if not known:
            if task != "transcribe" or language not in ("", "en"):
                raise InvalidPayload("the model knows English alone: it cannot translate, and 'language' must be en")
            return []
        if language and language not in known:
            some = ", ".join(sorted(known))
            raise InvalidParameter(f"language={language[:64]}: the model does not know it; it knows {some}")
        return [*([known[language]] if language else []), self._ids.tasks[task]]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        return ids
