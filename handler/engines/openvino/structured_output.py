"""Structured output by OpenVINO GenAI (xgrammar inside it), and the check of a text before the engine gets it.

GenAI compiles a text in its request's first step, and finds the allowed tokens in every later one. A failure there
fails the whole batch. So a text first runs in a pipeline of a blank model with the real tokenizer. GenAI keeps compiled
grammars with the tokenizer, so the real pipeline finds them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.openvino.decoder.config import Decoder, Layer, Rotary
from handler.engines.openvino.decoder.graph import decoder_graph
from handler.engines.openvino.ir_files import language_model
from handler.engines.openvino.model import eos_ids
from handler.engines.process.sandbox import status_bytes
from handler.engines.structured_output.ebnf import MARKER, Unreadable, abridged_parts, acyclic
from handler.engines.structured_output.json_grammar import json_grammar, one_of
from handler.engines.structured_output.validator import FairQueue, sort
from handler.engines.structured_output.xgrammar import (
    XgrammarSupport,
    contents,
    cyclic_reference,
    forecast,
    ignored,
    with_schemas,
    without_text,
)

# -- write a blank model, to which all tokens but one are equally likely, for checks of structured output -------------
# It is made in milliseconds, takes a few megabytes, and runs in a pipeline with another model's tokenizer.

_SIZE = 32  # of its one attention head: the CPU plugin's smallest
_BLANK = Decoder(
    model_type="blank",
    vocabulary=0,
    size=_SIZE,
    inner_size=_SIZE,
    heads=1,
    key_heads=1,
    head_size=_SIZE,
    layers=(Layer(None, Rotary(_SIZE, {"rope_theta": 10_000.0}, 1 << 20)),),
    epsilon=1e-6,
    activation="silu",
    scale=1.0,
    attention_biases=(),
    mlp_bias=False,
    head_norms=False,
    is_gemma=False,
    four_norms=False,
    tied=False,
    logit_cap=None,
)


def blank_model(num_logits: int, favourite: int | None = None) -> Mapping[str, bytes]:
    """Make the model's files; returns name -> content.

    Args:
        favourite: a token that is more likely than all others together.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_blank_model(Path(directory), num_logits, favourite)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def write_blank_model(directory: Path, num_logits: int, favourite: int | None = None) -> None:
    """Write `openvino_model.xml` and `.bin`: one layer of a Llama, whose weights are all zero.

    GenAI replaces the attention by paged attention, and finds it by its cache, so there must be one.
    """
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    likely = np.zeros((num_logits, _SIZE), np.float32)
    if favourite is not None:
        likely[favourite] = (3 + math.log(num_logits)) / _SIZE  # what is multiplied by it is 1 everywhere

    def matrix(name: str) -> Any:
        if name == "lm_head.weight":
            return ops.constant(likely)
        one = ops.constant(np.full((1, _SIZE), float(name == "model.embed_tokens.weight"), np.float32))
        rows = num_logits if name == "model.embed_tokens.weight" else _SIZE
        return ops.broadcast(one, np.array([rows, _SIZE]))

    graph = decoder_graph(_BLANK, matrix, lambda name: np.ones(_SIZE, np.float32))
    openvino.save_model(graph, directory / "openvino_model.xml", compress_to_fp16=False)


MASK_SECONDS = 0.05
"""CPU time of finding a step's allowed tokens, on average; the whole batch waits for it."""

_GRAMMAR = XgrammarSupport(bounds=True, others=True)
_CONVERTER = XgrammarSupport(bounds=False, others=False)
"""What our own grammars support, which refuse all else, and what GenAI's xgrammar does."""

_WALKS = (1, 2)  # seeds
_STEPS = 64  # of a walk, unless they become slower and slower
_MOST_STEPS = 200  # also the steps of a walk through an abridged grammar
_FEW_PARTS = 4  # with more, the walks through them are shorter
_TEMPERATURES = (1.0, 1.3)
"""Temperatures of those walks: they take an allowed marker nearly always, or about half the time."""

_EVEN = 100.0  # the temperature at which all tokens are about equally likely
_ANSWER = 2000  # tokens, by which steps that become slower and slower must not have become too slow
_WINDOW = 8  # steps of the average

_FIRST = StructuredOutput("choice", '["a"]')
"""Compiled before a measurement, which must not count what all texts share."""


def genai_arguments(structured_output: StructuredOutput) -> dict[str, str]:
    """Make the keywords of `openvino_genai.StructuredOutputConfig`.

    Raises:
        ValueError: it cannot follow the text.
    """
    match structured_output.kind:
        case "json_schema":
            schema = json.loads(structured_output.value)
            grammar = _grammar(schema)
            return {"json_schema": structured_output.value} if grammar is None else {"grammar": grammar}
        case "json_object":
            return genai_arguments(StructuredOutput("json_schema", '{"type": "object"}'))
        case "regex":
            return {"regex": structured_output.value}
        case "grammar":
            return {"grammar": structured_output.value}
        case "choice":
            choices = json.loads(structured_output.value)
            if any("\0" in choice for choice in choices):
                raise ValueError("xgrammar has no NUL")  # it would ignore it
            return {"grammar": f"root ::= {one_of(choices)}"}
        case "structural_tag":
            tag = json.loads(structured_output.value)
            tag["format"] = with_schemas(tag["format"], _own_grammar)
            return {"structural_tags_config": json.dumps(tag, ensure_ascii=False)}
    raise ValueError(f"OpenVINO GenAI has no structured output of the kind {structured_output.kind!r}")


def _grammar(schema: Any) -> str | None:
    """Return our own grammar of a schema; None if there is none, and xgrammar follows the schema itself.

    Raises:
        ValueError: neither follows it.
    """
    grammar = json_grammar(schema)
    if keyword := ignored(schema, _CONVERTER if grammar is None else _GRAMMAR):
        raise ValueError(f"the schema's {keyword} cannot be followed by OpenVINO GenAI's xgrammar")
    if reference := cyclic_reference(schema):
        raise ValueError(
            f"the schema's reference {reference!r} is cyclic: it leads back to itself, with nothing in between"
        )
    return grammar


def _own_grammar(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a schema of a structural tag by our own grammar."""
    grammar = _grammar(tag["json_schema"])
    return tag if grammar is None else {"type": "grammar", "grammar": grammar}


class OpenVinoCheck:
    """See `engines.base.StructuredOutputCheck`. A process may be forked from its own before the first call.

    Args:
        config: names the model's files.
        tokenizer: GenAI's, of those files; None to have it loaded.
    """

    def __init__(self, config: EngineConfig, tokenizer: Any = None) -> None:
        import openvino_genai

        model = config.model
        assert model is not None

        self._genai = openvino_genai
        self._tokenizer = openvino_genai.Tokenizer(str(model)) if tokenizer is None else tokenizer
        self._eos = eos_ids(config, self._tokenizer)
        self._num_logits = count_logits(model) or len(self._tokenizer.get_vocab())
        self._pipeline: Any = None  # not at once: a fork would lose its threads
        marker = self._tokenizer.get_vocab().get(MARKER.encode())
        self._model = blank_model(self._num_logits, marker)  # at once: it takes longer than all else

    def prepare(self) -> None:
        """Load what all texts need by compiling a first one, in 0.1 s. If that fails, `__call__` raises the error."""
        with contextlib.suppress(Exception):
            self.compile(_FIRST)

    def __call__(self, structured_output: StructuredOutput) -> int:
        """Return the bytes that the engine will keep: GenAI never frees a compiled grammar.

        Raises:
            ValueError: it cannot follow the text, or needs too long for a step's allowed tokens.
        """
        parts = self._abridged(structured_output)
        self.compile(_FIRST)
        before = status_bytes("RssAnon")  # in a process that does nothing else it grows by what is compiled, or by more
        self.compile(structured_output)
        kept = max(status_bytes("RssAnon") - before, 0)
        ruled = without_text(structured_output)
        self.compile(ruled)  # else the first walk would
        for seed in _WALKS:
            self._walk(ruled, seed)
        for part in parts:
            try:
                self.compile(part)
            except ValueError:
                if part.kind == "regex" and structured_output.kind != "regex":
                    continue  # it is a value that looks like a pattern
                raise
            for temperature in _TEMPERATURES:
                self._walk(part, _WALKS[0], _MOST_STEPS if len(parts) < _FEW_PARTS else _STEPS, temperature)
        return kept

    def _abridged(self, structured_output: StructuredOutput) -> Sequence[StructuredOutput]:
        """Return a client's text, or its parts, with nothing costly after a long start.

        Raises:
            ValueError: a rule is cyclic, or the text is no grammar.
        """
        if structured_output.kind == "structural_tag":
            parts = [part for each in contents(structured_output) for part in self._abridged(each)]
            return list(dict.fromkeys(parts))
        grammar = genai_arguments(structured_output).get("grammar")
        if grammar is None:
            return abridged_parts(structured_output)
        try:
            rules = acyclic(grammar)
        except Unreadable:
            self.compile(structured_output)  # which refuses it in xgrammar's words
            raise
        own = structured_output.kind == "grammar"  # our grammars of schemas and choices have no costly parts
        return [StructuredOutput("grammar", text) for text in rules.abridged()] if own else ()

    def compile(self, structured_output: StructuredOutput) -> None:
        """Compile a text for all pipelines with this tokenizer, without the GIL.

        Raises:
            ValueError: GenAI cannot follow it.
        """
        if not self._eos:
            raise ValueError("the model names no end token, which structured output needs")
        try:
            # `step` would keep the GIL.
            self._blank_pipeline().generate([self._prompt()], [self._config(structured_output, 0, max_new_tokens=1)])
        except RuntimeError as error:
            raise ValueError(_reason(error)) from None

    def _walk(
        self, structured_output: StructuredOutput, seed: int, steps: int = _STEPS, temperature: float = _EVEN
    ) -> None:
        """Generate the start of an answer: each state may need a mask of its own, and a later one may cost more.

        Args:
            steps: the walk ends after them, unless they become slower and slower.

        Raises:
            ValueError: a step takes too long, or would in a long answer.
        """
        pipeline = self._blank_pipeline()
        config = self._config(structured_output, seed, max_new_tokens=_MOST_STEPS, temperature=temperature)
        handle = pipeline.add_request(0, self._prompt(), config)
        seconds: list[float] = []
        too_slow = False
        while pipeline.has_non_finished_requests():
            began = time.process_time()
            pipeline.step()
            seconds.append(time.process_time() - began)
            too_slow = sum(seconds[-_WINDOW:]) > MASK_SECONDS * _WINDOW
            if too_slow or (len(seconds) == steps and forecast(seconds, _ANSWER) < MASK_SECONDS):
                handle.cancel()
                pipeline.step()  # frees the request
                break
        if too_slow:
            raise ValueError(f"each token takes the engine more than {MASK_SECONDS:g} s")
        if len(seconds) == _MOST_STEPS and forecast(seconds, _ANSWER) > MASK_SECONDS:
            raise ValueError(f"after {_ANSWER} tokens, each takes the engine more than {MASK_SECONDS:g} s")

    def _blank_pipeline(self) -> Any:
        if self._pipeline is None:
            scheduler = self._genai.SchedulerConfig()
            scheduler.max_num_seqs = 1
            scheduler.num_kv_blocks = 16
            with tempfile.TemporaryDirectory() as directory:
                for name, content in self._model.items():
                    (Path(directory) / name).write_bytes(content)
                self._pipeline = self._genai.ContinuousBatchingPipeline(directory, self._tokenizer, scheduler, "CPU")
        return self._pipeline

    def _prompt(self) -> Any:
        import numpy
        import openvino

        return openvino.Tensor(numpy.zeros((1, 1), dtype=numpy.int64))

    def _config(
        self, structured_output: StructuredOutput, seed: int, *, max_new_tokens: int, temperature: float = _EVEN
    ) -> Any:
        """Sample: all tokens, or all but the marker, are equally likely: a walk meets states that a model might not."""
        config = self._genai.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature, rng_seed=seed
        )
        config.eos_token_id = min(self._eos)
        config.stop_token_ids = set(self._eos)
        config.structured_output_config = self._genai.StructuredOutputConfig(**genai_arguments(structured_output))
        return config


def structured_output_check(config: EngineConfig) -> OpenVinoCheck:
    return OpenVinoCheck(config)


def count_logits(model: Path) -> int | None:
    """Count the rows of the model's last matrix, which may be more than the tokens."""
    import openvino

    if not model.is_dir():
        return None  # a GGUF file, which has as many rows as tokens
    last = openvino.Core().read_model(language_model(model)).output("logits").get_partial_shape()[-1]
    return int(last.get_length()) if last.is_static else None


def _reason(error: RuntimeError) -> str:
    """Return xgrammar's message without the place in its source."""
    text = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip())
    return re.sub(r"^Check failed: .*? is false: ", "", text).strip()[:300]


# -- compile schemas, expressions and grammars on a thread, so that no other request waits -----------------------------


_NICE = 10  # token generation goes first
_MAX_KNOWN = 1024
_SOON = 0.005  # seconds that a step waits for a text: GenAI has those that it knows by then
_IDLE = 0.05  # seconds, where a step has nothing else to do


class _Waiting(NamedTuple):
    key: int
    structured_output: StructuredOutput


class GrammarCompiler:
    """Used by the engine's thread only.

    GenAI locks its compiled grammars while it compiles, and a request needs them when it starts. So one text is
    compiled at a time, after the start of all requests that are ready. Those with known texts go before all that wait;
    they cannot begin while one is compiled, as the whole engine would wait for the lock.

    Args:
        compile: compiles a text, or raises ValueError; called on a thread.
    """

    def __init__(self, compile: Callable[[StructuredOutput], None]) -> None:
        self._compile = compile
        self._waiting = FairQueue[_Waiting]()
        self._current: _Waiting | None = None
        self._known: OrderedDict[StructuredOutput, None] = OrderedDict()  # the one used last comes last
        self._jobs: queue.SimpleQueue[StructuredOutput] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started = False

    def add(self, key: int, structured_output: StructuredOutput) -> None:
        self._waiting.put(sort(structured_output), _Waiting(key, structured_output))

    def cancel(self, key: int) -> None:
        """Forget a request; its text still gets compiled, as others may need it."""
        self._waiting.drop(lambda waiting: waiting.key == key)

    def step(self, *, idle: bool) -> list[tuple[int, str]]:
        """Return the keys of the requests that can go on, each with the reason why its text is refused, or "".

        A request that was cancelled meanwhile may be among them.

        Args:
            idle: the engine has no other work.
        """
        ready: list[tuple[int, str]] = []
        patience = 0.0  # only in the step that starts a compilation: later ones would delay other requests
        while True:
            if self._current is None:
                ready += [(key, "") for key in self._take_known()]
                if ready or (following := self._waiting.first()) is None:
                    break
                self._waiting.get()
                self._current = following
                self._start(following.structured_output)
                patience = _SOON
            try:
                error = self._results.get(timeout=_IDLE if idle else patience)
            except queue.Empty:
                break
            key, structured_output = self._current
            self._current = None
            ready.append((key, error))
            if not error:
                self._known[structured_output] = None
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return ready

    def _take_known(self) -> list[int]:
        """Take out the requests whose texts are known."""
        keys: list[int] = []

        def is_known(waiting: _Waiting) -> bool:
            if waiting.structured_output not in self._known:
                return False
            self._known.move_to_end(waiting.structured_output)
            keys.append(waiting.key)
            return True

        self._waiting.drop(is_known)
        return keys

    def _start(self, structured_output: StructuredOutput) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="guides", daemon=True).start()
        self._jobs.put(structured_output)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # xgrammar's threads inherit it
        while True:
            structured_output = self._jobs.get()
            try:
                self._compile(structured_output)
            except Exception as error:  # foreign code: it refuses this request
                self._results.put(str(error) or type(error).__name__)
            else:
                self._results.put("")
