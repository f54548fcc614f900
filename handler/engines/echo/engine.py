"""An engine that has no model and repeats the words of the prompt. Each word is a token.

The engine is deterministic and fast. It is meant for tests, for trying out clients and for measuring the host. The next
word always has probability 1, so parameters that only change the distribution have no effect. With an adapter whose id
is N, the repetition begins N words after the first word of the prompt. An image is encoded as the word `<image>`, and
audio as the word `<audio>`.

Options:
    echo_tokens_per_second: steps per second, each of which produces one token for every request. 0, the default, means
        no limit.
    echo_tokenizer: Hugging Face directory with a tokenizer to use in place of the division into words.
    echo_cues: if true, the engine refuses a prompt that contains `<refuse>`. Instead of repeating the word `<raise>`,
        `<hang>` or `<die>`, the engine raises an exception, hangs or dies. The default is false, because a prompt must
        not be able to stop a server.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import math
import re
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from handler.core.errors import ConfigError, PromptTooLong
from handler.core.media import MEDIA, SAMPLE_RATE, FixedTokens, MediaTokens
from handler.core.package import install
from handler.core.text import Prompt, Vocabulary, cut_after
from handler.core.values import (
    PLAIN_TEMPLATE,
    POOLED,
    Adapter,
    Extras,
    Finish,
    Heard,
    Objects,
    Pooling,
    Sampling,
    Task,
    TemplateOptions,
)
from handler.engines.base import (
    NO_LORA,
    Capabilities,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    NoAdapters,
    Output,
    Step,
    Tokenizer,
    new_step,
)
from handler.engines.huggingface.pooling import NO_POOLED_LORA, HfPoolingTokenizer, PooledTexts, PoolingFiles, fit

CUES = ("<raise>", "<hang>", "<die>", "<refuse>")
"""Words that cause failures. Their ids are 0 to 3 in the vocabulary of every prompt."""

REFUSE = CUES.index("<refuse>")


def _context(config: EngineConfig) -> int:
    return config.options.max_model_len or CONTEXT


def act(cue: str) -> None:
    """Raise an exception, hang, or end the process or thread, depending on the cue."""
    if cue == "<hang>":
        threading.Event().wait()
    if cue == "<die>":
        raise SystemExit(3)  # ends the process, or the thread, without a message
    raise RuntimeError(f"raised on cue {cue}")


# -- echo's tokenizer: a word is a token -------------------------------------------------------------------------------


CONTEXT = 1 << 17
"""Context length in tokens unless option.max_model_len is set. Llama 3.1 has the same context length."""

_MOST_WORDS = 1 << 20  # of a prompt
_PIECES = re.compile(r".{1,65536}\S*", re.DOTALL)  # a text is split in short calls, because other threads need the GIL
_MEDIA = {kind: f"<{kind}>" for kind in MEDIA}  # in prompts with media, their ids follow those of the cues


class EchoTokenizer:
    """Numbers the words of a prompt in order of first appearance, so each prompt has its own vocabulary.

    Args:
        context: the engine's context length, in tokens. Longer prompts are accepted up to `_MOST_WORDS` words, because
            they may be truncated later.
    """

    vocabulary: Vocabulary | None = None
    chat_template = ""
    media_tokens: Mapping[str, MediaTokens] = MappingProxyType(
        {kind: FixedTokens(id, _MEDIA[kind]) for id, kind in enumerate(MEDIA, len(CUES))}
    )

    def __init__(self, context: int = CONTEXT) -> None:
        self._context = context
        self._most = max(context, _MOST_WORDS)

    def encode(self, text: str, *, media: bool = False) -> Prompt:
        cues = (*CUES, *_MEDIA.values()) if media else CUES
        ids = defaultdict[str, int](itertools.count(len(cues)).__next__, zip(cues, itertools.count()))
        indices: list[int] = []
        for piece in _PIECES.finditer(text):
            indices += map(ids.__getitem__, piece[0].split())
            if len(indices) > self._most:
                raise PromptTooLong("inputs", self._most + 1, self._context - 1, exact=False)
        words = [f" {word}" for word in ids]
        return Prompt(text, indices, Vocabulary([*map(str.encode, words)], texts=[*words]))

    def encode_pooled(
        self, texts: Sequence[str], most: int | None, side: str | None, *, special: bool = True
    ) -> PooledTexts:
        """Encode the words of one or two texts, without special tokens. A word's id is its hash, so a word has the same
        id in every text.
        """
        words = [text.split() for text in texts]
        lengths = [len(part) for part in words]
        if most is not None and sum(lengths) > most:
            if side is None:
                raise PromptTooLong("inputs", sum(lengths), most)
            lengths = fit(lengths, most)
            words = [
                part[:length] if side == "right" else part[len(part) - length :]
                for part, length in zip(words, lengths, strict=True)
            ]
        cues = {cue: id for id, cue in enumerate(CUES)}
        ids = [cues.get(word, len(cues) + zlib.crc32(word.encode())) for part in words for word in part]
        return PooledTexts(Prompt(texts[0], ids, Vocabulary([])), lengths[0] if len(texts) > 1 else None)

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        text = self.render_chat(messages, options)
        try:
            return self.encode(text, media=any(isinstance(message["content"], list) for message in messages))
        except PromptTooLong as error:
            raise error.named("messages") from None

    def render_chat(self, messages: Objects, options: TemplateOptions) -> str:
        """Write a line `role: content` per message, and a line `assistant:` if `add_generation_prompt` is set."""
        lines = [f"{message['role']}: {_written(message['content'])}" for message in messages]
        if options.add_generation_prompt:
            lines.append("assistant:")
        text = "\n".join(lines)
        return cut_after(text, messages[-1]["content"]) if options.continue_final_message else text


def _written(content: str | Sequence[Mapping[str, Any]]) -> str:
    return (
        content
        if isinstance(content, str)
        else " ".join([part["text"] if part["type"] == "text" else _MEDIA[part["type"]] for part in content])
    )


# -- echo's embeddings, scores and classifications: numbers that depend on nothing but a text's words ------------------


_DIMENSIONS = 8
_LABELS = 2


class EchoPooling(NoAdapters):
    """Computes embeddings, scores and class logits from a text's words. Equal texts get equal results."""

    no_adapters = NO_POOLED_LORA

    def __init__(self, config: EngineConfig) -> None:
        self._cues = bool(config.engine_options.get("echo_cues", 0))
        self._waiting: dict[int, tuple[Sequence[int], Pooling]] = {}
        self._files = PoolingFiles("mean", normalize=True, most_tokens=None, exclusive=True)
        self.info = EngineInfo("echo", "1", "none", "none", _context(config), _DIMENSIONS)

    def add(self, request: EngineRequest) -> None:
        if self._cues and REFUSE in request.ids:
            raise ValueError("refused on cue")
        self._waiting[request.key] = request.ids, request.pooling

    def cancel(self, key: int) -> None:
        self._waiting.pop(key, None)

    def step(self) -> Step:
        outputs = []
        for key, (ids, pooling) in self._waiting.items():
            if self._cues and (cue := min(ids)) < len(CUES):
                act(CUES[cue])
            outputs.append(self._files.output(key, self._numbers(ids, pooling), pooling))
        self._waiting.clear()
        return Step.of(outputs)

    def _numbers(self, ids: Sequence[int], pooling: Pooling) -> Any:
        import numpy

        size = {"embed": _DIMENSIONS, "score": 1, "classify": _LABELS}[pooling.kind]
        digest = hashlib.shake_128(repr((*ids, pooling.second)).encode()).digest(2 * size)
        return numpy.frombuffer(digest, dtype="<i2").astype(numpy.float32) / (1 << 13)  # from -4 to 4

    def close(self) -> None:
        self._waiting.clear()


_SUPPORTS = frozenset({
    "max_new_tokens", "min_new_tokens", "stop_token_ids",  # `_length`
    "ignore_eos",  # there is no end token
    # These only shape a distribution, and there is only one token to choose from. A new field is refused until it is
    # added here. Fields that only a single engine supports are not added.
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias",
})  # fmt: skip

_REASONS = {
    "num_beams": "it has no beam search",
    "bad_sequences": "it can only repeat the prompt",
    "bad_token_ids": "it can only repeat the prompt",
    "allowed_token_ids": "it can only repeat the prompt",
    "cache_salt": "it has no prefix cache",
    "no_repeat_ngram_size": "it can only repeat the prompt",
    "structured_output": "it can only repeat the prompt",
    "thinking_token_budget": "it can only repeat the prompt",
    "prompt_logprobs": "it does not score prompts",
    "top_logprobs": "it reports no alternative tokens",
    "return_context_logits": "it has no logits",
    "return_generation_logits": "it has no logits",
}


class Echo:
    """Engine that repeats the prompt; see `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        rate = config.engine_options.get("echo_tokens_per_second", 0.0)
        self._pause = 1.0 / rate if rate else 0.0
        self._transcribes = config.task is Task.TRANSCRIPTION
        self._cues = bool(config.engine_options.get("echo_cues", 0))
        self._labels: dict[int, tuple[Sequence[int], Pooling]] = {}  # requests for the log-probabilities of labels
        self._heard: dict[int, Heard] = {}  # audio that arrived since the last step, by key of its request
        self._active: dict[int, Iterator[int]] = {}  # remaining ids of each sequence, by key
        self._num_steps = 0
        self._last_steps: dict[int, int] = {}  # by key
        self._ends: defaultdict[int, dict[int, Finish]] = defaultdict(dict)  # by step, then by key
        self._next = 0.0
        self.info = EngineInfo("echo", "1", "none", "none", _context(config))

    def add(self, request: EngineRequest) -> None:
        key, ids, adapter = request.key, request.ids, request.adapter
        if self._cues and REFUSE in ids:
            raise ValueError("refused on cue")
        if isinstance(request.parameters, Pooling):
            self._labels[key] = ids, request.parameters
            return
        if not self._active:
            self._next = 0.0  # restart the clock after a pause
        skip = adapter.id % len(ids) if adapter else 0
        ids = [*ids[skip:], *ids[:skip]]
        if self._transcribes and request.media is not None:
            self._heard[key] = Heard(0.0, request.media.media[0].size[0] / SAMPLE_RATE, "")
        num_tokens, finish = _length(ids, request.sampling)
        self._active[key] = itertools.cycle(ids)
        self._last_steps[key] = last = self._num_steps + num_tokens
        self._ends[last][key] = finish

    def cancel(self, key: int) -> None:
        self._labels.pop(key, None)
        self._heard.pop(key, None)
        if self._active.pop(key, None) is not None:
            ends = self._ends[last := self._last_steps.pop(key)]
            del ends[key]
            if not ends:
                del self._ends[last]

    def step(self) -> Step:
        if self._pause:
            self._wait()
        self._num_steps += 1
        outputs: list[Output] = []
        if self._heard:
            outputs += [Output(key, extras=Extras(heard=heard)) for key, heard in self._heard.items()]
            self._heard.clear()
        if self._num_steps in self._ends:
            for key, finish in self._ends.pop(self._num_steps).items():
                del self._last_steps[key]
                outputs.append(Output(key, (next(self._active.pop(key)),), (0.0,), finish))
        ids = list(map(next, self._active.values()))
        if self._cues:
            for id in (*ids, *(output.ids[0] for output in outputs if output.ids)):
                if id < len(CUES):
                    act(CUES[id])
        if self._labels:
            outputs += self._label_outputs()
        return new_step((list(self._active), ids, [0.0] * len(ids), outputs))

    def _label_outputs(self) -> list[Output]:
        """Return the log-probabilities of labels. They depend on nothing but the ids of the prompt and the labels."""
        outputs = []
        for key, (ids, pooling) in self._labels.items():
            if self._cues and (cue := min(ids)) < len(CUES):
                act(CUES[cue])
            logprobs = _label_logprobs(ids, pooling.labels)
            outputs.append(Output(key, finish=Finish.STOP, extras=Extras(vector=[*logprobs, max(logprobs)])))
        self._labels.clear()
        return outputs

    def load_adapter(self, adapter: Adapter) -> None:
        """Check that the adapter's path is a directory."""
        if not Path(adapter.path).is_dir():
            raise ValueError(f"there is no directory {adapter.path}")

    def drop_adapter(self, adapter: Adapter) -> None:
        pass

    def close(self) -> None:
        self._labels.clear()
        for key in list(self._active):
            self.cancel(key)

    def _wait(self) -> None:
        """Wait until the next step is due. Steps are due at regular intervals, however long each of them takes."""
        now = time.monotonic()
        due = self._next + self._pause
        self._next = due if due > now - 2 * self._pause else now  # missed steps are not made up for
        if self._next > now:
            time.sleep(self._next - now)


def _label_logprobs(ids: Sequence[int], labels: Sequence[str]) -> list[float]:
    """Return log-probabilities that are the same for equal ids and labels, and whose probabilities sum to 1."""
    logits = [zlib.crc32(repr((*ids, label)).encode()) / (1 << 30) for label in labels]  # from 0 to 4
    norm = math.log(math.fsum(map(math.exp, logits)))
    return [logit - norm for logit in logits]


def _length(ids: Sequence[int], sampling: Sampling) -> tuple[int, Finish]:
    """Return the number of tokens to generate from `ids`, and the finish reason."""
    least, most = sampling.min_new_tokens, max(sampling.max_new_tokens, 1)
    stops = frozenset(sampling.stop_token_ids)
    if stops:
        for position in range(least, min(least + len(ids), most)):
            if ids[position % len(ids)] in stops:
                return position + 1, Finish.STOP
    return most, Finish.LENGTH


def check(model_id: str | None, config: EngineConfig) -> None:
    """Check option.echo_tokenizer, which cannot be combined with option.echo_cues.

    Raises:
        ConfigError: the directory or transformers is missing, or both options are set.
    """
    directory = config.engine_options.get("echo_tokenizer")
    if directory is None:
        return
    if config.engine_options.get("echo_cues"):
        raise ConfigError("option.echo_cues: cannot be combined with option.echo_tokenizer")
    if not Path(directory).is_dir():
        raise ConfigError(f"option.echo_tokenizer={directory}: there is no such directory")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"option.echo_tokenizer needs transformers: {install('lmi-handler[openai]')}")


def prepare(model_id: str | None, config: EngineConfig) -> None:
    """Do nothing, as this engine needs no files."""


def capabilities(config: EngineConfig) -> Capabilities:
    return Capabilities(
        _SUPPORTS,
        _REASONS,
        no_adapters="" if config.engine_options.get("enable_lora") else NO_LORA,
        labels=True,
        no_media={} if config.engine_options.get("echo_tokenizer") else dict.fromkeys(MEDIA, ""),
    )


def load(config: EngineConfig) -> Echo | EchoPooling:
    return EchoPooling(config) if config.task in POOLED else Echo(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    directory = config.engine_options.get("echo_tokenizer")
    if directory is None:
        return EchoTokenizer(_context(config))
    if config.task in POOLED:
        return HfPoolingTokenizer(Path(directory), config.chat_template)
    from handler.engines.huggingface.tokenizer import HfTokenizer

    return HfTokenizer(Path(directory), chat_template=config.chat_template)
