"""Engine without a model: it repeats the prompt's words, one word a token.

It is deterministic and fast: for tests, for trying a client, for measuring the host. The next word has probability 1,
so parameters that only shape a distribution have no effect. With an adapter it skips as many words as the adapter's id.
An image is the word `<image>`, an audio clip `<audio>`.

Options:
    echo_tokens_per_second: steps a second, each with one token for every request; 0 (default) is no limit.
    echo_tokenizer: a Hugging Face directory whose tokenizer makes the tokens.
    echo_cues: the prompt's words `<raise>`, `<hang>` and `<die>` make the engine do so when it comes to them, and
        `<refuse>` makes it refuse the request. Off by default: a prompt must not stop a server.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from handler.core.errors import ConfigError
from handler.core.media import MEDIA, SAMPLE_RATE
from handler.core.values import POOLED, Adapter, Extras, Finish, Heard, Sampling, Task
from handler.engines.base import (
    NO_LORA,
    Capabilities,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    Output,
    Step,
    Tokenizer,
)
from handler.engines.echo.cues import CUES, REFUSE, act
from handler.engines.echo.pooling import EchoPooling
from handler.engines.echo.tokenizer import CONTEXT, EchoTokenizer
from handler.engines.huggingface.pooling_tokenizer import HfPoolingTokenizer

_SUPPORTS = frozenset({
    "max_new_tokens", "min_new_tokens", "stop_token_ids",  # `_length`
    "ignore_eos",  # it has no end token
    # These only shape a distribution, and it has one token to choose from.
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias",
})  # fmt: skip

_REASONS = {
    "num_beams": "it has no beam search",
    "bad_sequences": "it only ever echoes",
    "bad_token_ids": "it only ever echoes",
    "no_repeat_ngram_size": "it only ever echoes",
    "structured_output": "it only ever echoes",
    "thinking_token_budget": "it only ever echoes",
    "prompt_logprobs": "it does not score prompts",
    "top_logprobs": "it has no alternatives to its tokens",
    "return_context_logits": "it has no logits",
    "return_generation_logits": "it has no logits",
}


class Echo:
    """See `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        rate = config.options.engine_options.get("echo_tokens_per_second", 0.0)
        self._pause = 1.0 / rate if rate else 0.0
        self._transcribes = config.task is Task.TRANSCRIPTION
        self._cues = bool(config.options.engine_options.get("echo_cues", 0))
        self._heard: dict[int, Heard] = {}  # of the clips that came since the last step, by their keys
        self._active: dict[int, Iterator[int]] = {}  # each sequence's ids to come, by its key
        self._num_steps = 0
        self._last_steps: dict[int, int] = {}  # by key
        self._ends: defaultdict[int, dict[int, Finish]] = defaultdict(dict)  # by their step, then by key
        self._next = 0.0
        self.info = EngineInfo("echo", "1", "none", "none", config.options.max_model_len or CONTEXT)

    def add(self, request: EngineRequest) -> None:
        key, ids, adapter = request.key, request.ids, request.adapter
        if self._cues and REFUSE in ids:
            raise ValueError("refused on cue")
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
        others = [Output(key, (), (), extras=Extras(heard=heard)) for key, heard in self._heard.items()]
        self._heard.clear()
        for key, finish in self._ends.pop(self._num_steps, {}).items():
            del self._last_steps[key]
            others.append(Output(key, (next(self._active.pop(key)),), (0.0,), finish))
        ids = list(map(next, self._active.values()))
        if self._cues:
            for id in (*ids, *(output.ids[0] for output in others)):
                if id < len(CUES):
                    act(CUES[id])
        return Step(list(self._active), ids, [0.0] * len(ids), others)

    def load_adapter(self, adapter: Adapter) -> None:
        """Check that the adapter is a directory."""
        if not Path(adapter.path).is_dir():
            raise ValueError(f"there is no directory {adapter.path}")

    def drop_adapter(self, adapter: Adapter) -> None:
        pass

    def close(self) -> None:
        for key in list(self._active):
            self.cancel(key)

    def _wait(self) -> None:
        """Wait for the next tick of a clock, so that a step's own time does not slow the next one down."""
        now = time.monotonic()
        due = self._next + self._pause
        self._next = due if due > now - 2 * self._pause else now  # lost ticks are not made up for
        if self._next > now:
            time.sleep(self._next - now)


def _length(ids: Sequence[int], sampling: Sampling) -> tuple[int, Finish]:
    """Return how many tokens an echo of `ids` has, and why it ends."""
    least, most = sampling.min_new_tokens, max(sampling.max_new_tokens, 1)
    stops = frozenset(sampling.stop_token_ids)
    if stops:
        for position in range(least, min(least + len(ids), most)):
            if ids[position % len(ids)] in stops:
                return position + 1, Finish.STOP
    return most, Finish.LENGTH


def check(model_id: str | None, config: EngineConfig) -> None:
    """Check the tokenizer; cues, which are words of echo's own, come without another one."""
    directory = config.options.engine_options.get("echo_tokenizer")
    if directory is None:
        return
    if config.options.engine_options.get("echo_cues"):
        raise ConfigError("option.echo_cues: has no words with option.echo_tokenizer")
    if not Path(directory).is_dir():
        raise ConfigError(f"option.echo_tokenizer={directory}: there is no such directory")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("option.echo_tokenizer needs transformers: pip install 'lmi-handler[openai]'")


def prepare(model_id: str | None, config: EngineConfig) -> None:
    """Prepare nothing: it needs no files."""


def capabilities(config: EngineConfig) -> Capabilities:
    return Capabilities(
        _SUPPORTS,
        _REASONS,
        no_adapters="" if config.options.engine_options.get("enable_lora") else NO_LORA,
        no_media={} if config.options.engine_options.get("echo_tokenizer") else dict.fromkeys(MEDIA, ""),
    )


def load(config: EngineConfig) -> Echo | EchoPooling:
    return EchoPooling(config) if config.task in POOLED else Echo(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    directory = config.options.engine_options.get("echo_tokenizer")
    if directory is None:
        return EchoTokenizer()
    if config.task in POOLED:
        return HfPoolingTokenizer(Path(directory))
    from handler.engines.huggingface.tokenizer import HfTokenizer

    return HfTokenizer(Path(directory), chat_template=config.chat_template)
