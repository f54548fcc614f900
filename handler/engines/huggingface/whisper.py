"""Support for Whisper models in all engines: prompt tokens, timestamps, and splitting of audio into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config import model_files
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload
from handler.core.media import SAMPLE_RATE, FixedTokens, MediaTokens, Medium
from handler.core.text import Prompt, Vocabulary
from handler.core.values import PLAIN_TEMPLATE, Objects, TemplateOptions
from handler.engines.base import Capabilities, EngineRequest

TRANSCRIBING = Capabilities(
    frozenset({"max_new_tokens", "do_sample", "temperature"}),
    no_adapters="adapters are not supported for transcription",
    no_media={"audio": ""},
)

NO_ADAPTERS = "LoRA adapters are not supported with Whisper models"

WINDOW = 30  # seconds of audio that Whisper processes at once
_SEARCHED = SAMPLE_RATE  # samples at the end of a window in which a clip may be cut
_QUIET = SAMPLE_RATE // 10  # samples of each part whose loudness is compared
_STEP = 0.02  # seconds between two timestamp tokens
_GENERATION = "generation_config.json"


class WhisperIds(NamedTuple):
    """The ids of special tokens. `languages` and `tasks` are empty if the model supports only English.

    Attributes:
        languages: ids by language code.
        suppressed: ids that must not occur in a transcript.
        most: maximum number of tokens in the prompt and the transcript of a piece together.
    """

    start: int
    previous: int | None
    no_timestamps: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    most: int

    def of_time(self, seconds: float) -> int:
        """Return the id of the timestamp token for a position in a piece, in seconds."""
        return self.no_timestamps + 1 + round(min(max(seconds, 0.0), WINDOW) / _STEP)

    def language_of(self, ids: Sequence[int]) -> str:
        """Return the code of the language that a prompt specifies, or "" if it does not specify any."""
        prefix = ids[list(ids).index(self.start) + 1 :]  # this skips a client's prompt
        return next((name for name, id in self.languages.items() if id in prefix), "")

    def in_language(self, ids: Sequence[int], language: str) -> list[int]:
        """Return the ids of a prompt with the id of a language added. The prompt must not specify a language yet."""
        after = list(ids).index(self.start) + 1
        return [*ids[:after], self.languages[language], *ids[after:]]


def whisper_ids(model: Path) -> WhisperIds:
    """Read the ids of the special tokens from generation_config.json.

    Raises:
        ConfigError: a required id is missing.
    """
    config = model_files.read_json(model / _GENERATION)
    start, no_timestamps = config.get("decoder_start_token_id"), config.get("no_timestamps_token_id")
    if not isinstance(start, int) or not isinstance(no_timestamps, int):
        raise ConfigError(
            f"{model / _GENERATION} has no decoder_start_token_id or no_timestamps_token_id: not a Whisper model"
        )
    multilingual = config if config.get("is_multilingual") else {}
    languages, tasks = (_ids_by_name(multilingual.get(name)) for name in ("lang_to_id", "task_to_id"))
    return WhisperIds(
        start,
        config.get("prev_sot_token_id"),
        no_timestamps,
        languages,
        tasks,
        tuple(id for id in config.get("suppress_tokens") or () if isinstance(id, int) and id >= 0),
        model_files.read_json(model / "config.json").get("max_target_positions", 448),
    )


def _ids_by_name(ids: Any) -> dict[str, int]:
    return {name.strip("<|>"): id for name, id in ids.items()} if isinstance(ids, dict) else {}


def clip_of(request: EngineRequest) -> tuple[Any, Medium]:
    """Return the samples of a request's audio clip, as a float32 array, and the clip itself.

    Raises:
        ValueError: the request does not have exactly one audio clip.
    """
    import numpy

    prompt = request.read_media()
    if prompt is None or len(prompt.media) != 1:
        raise ValueError("a transcription needs exactly one audio clip")
    (medium,) = prompt.media
    return numpy.frombuffer(medium.data, numpy.float32), medium


def cut(samples: Any) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each piece of a clip, in samples. A piece is at most `WINDOW` seconds long.

    Each piece except the last ends at the quietest part of the last second of its window, as in vLLM's server.

    Args:
        samples: the clip's samples as an array.
    """
    start, window = 0, WINDOW * SAMPLE_RATE
    while start + window < len(samples):
        searched = start + window - _SEARCHED
        parts = samples[searched : searched + _SEARCHED - _QUIET].reshape(-1, _QUIET)
        end = searched + int((parts**2).mean(axis=1).argmin()) * _QUIET
        yield start, end
        start = end
    yield start, len(samples)


def with_times(vocabulary: Vocabulary, ids: WhisperIds) -> Vocabulary:
    """Return the vocabulary with timestamps as special tokens. Some tokenizers do not contain timestamps."""
    first, last = ids.of_time(0), ids.of_time(WINDOW)
    pieces = [*vocabulary.pieces, *[b""] * (last + 1 - len(vocabulary))]
    pieces[first : last + 1] = [f"<|{number * _STEP:.2f}|>".encode() for number in range(last + 1 - first)]
    return Vocabulary(pieces, {*vocabulary.special, *range(first, last + 1)})


class WhisperTokenizer:
    """The tokenizer of a Whisper model. See `engines.base.Tokenizer`.

    Chat messages contain only an audio clip. The arguments in TemplateOptions specify the language, task and prompt.

    Args:
        encode: function that returns the ids of a text, without adding special tokens.
    """

    chat_template = ""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]], ids: WhisperIds) -> None:
        self.vocabulary = with_times(vocabulary, ids)
        self._encode, self._ids = encode, ids
        self.media_tokens: Mapping[str, MediaTokens] = {"audio": FixedTokens(ids.start, "<|startoftranscript|>")}

    def encode(self, text: str) -> Prompt:
        return Prompt(text, self._encode(text), self.vocabulary)

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        arguments = dict(options.arguments)
        timed = [] if arguments.get("timestamps") else [self._ids.no_timestamps]
        ids = [
            *self._previous(arguments.get("prompt", "")),
            self._ids.start,
            *self._language_and_task(**arguments),
            *timed,
        ]
        return Prompt("", ids, self.vocabulary)

    def _previous(self, text: str) -> list[int]:
        if not text:
            return []
        if self._ids.previous is None:
            raise InvalidPayload("'prompt' is not supported: the model has no prev_sot_token_id")
        # A token has at least one byte. Very long texts are not tokenized, as this would hold the GIL too long.
        most = self._ids.most // 2 - 1
        ids = self._encode(" " + text.strip()) if len(text) <= 64 * most else [0] * len(text)
        if len(ids) > most:
            raise InvalidPayload(f"'prompt' is too long: at most {most} tokens leave room for the transcript")
        return [self._ids.previous, *ids]

    def _language_and_task(self, task: str = "transcribe", language: str = "", **_: Any) -> list[int]:
        languages = self._ids.languages
        if not languages:
            if task != "transcribe" or language not in ("", "en"):
                raise InvalidPayload("the model supports only English: it cannot translate, and 'language' must be en")
            return []
        if language and language not in languages:
            some = ", ".join(sorted(languages))
            raise InvalidParameter(f"language={language[:64]}: the model only supports {some}")
        return [*([languages[language]] if language else []), self._ids.tasks[task]]
