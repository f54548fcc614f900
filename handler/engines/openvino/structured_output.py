"""Structured output with OpenVINO GenAI, which contains xgrammar. Each schema or grammar is checked before it is used.

GenAI compiles a grammar in a request's first step, and computes the allowed tokens in every later step. An error in any
of these steps makes the whole batch fail. Each grammar is therefore tried first in a pipeline with a blank model and
the real tokenizer. GenAI caches compiled grammars with the tokenizer, so the real pipeline reuses them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.fair_queue import FairQueue
from handler.core.loop import settle
from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.openvino.decoder.config import DecoderConfig, Layer, Rotary
from handler.engines.openvino.decoder.graph import decoder_graph
from handler.engines.openvino.ir_files import language_model
from handler.engines.openvino.model import eos_ids
from handler.engines.process.sandbox import status_bytes
from handler.engines.structured_output.abridged import MARKER, abridged_parts
from handler.engines.structured_output.characters import is_misread, literal
from handler.engines.structured_output.ebnf import InvalidGrammar, acyclic, respelled
from handler.engines.structured_output.json_grammar import json_grammar
from handler.engines.structured_output.nodes import choice_of
from handler.engines.structured_output.references import with_plain_references
from handler.engines.structured_output.regex import regex_grammar
from handler.engines.structured_output.validator import sort
from handler.engines.structured_output.xgrammar import (
    Pace,
    contents,
    cyclic_reference,
    ignored,
    unescaped_pattern,
    with_parts,
    without_text,
)

# -- write a blank model for checks of structured output: all tokens except one are equally likely ---------------------
# Writing it takes milliseconds and a few megabytes. It runs in a pipeline with another model's tokenizer.

_SIZE = 32  # of its only attention head: the smallest size that the CPU plugin supports
_BLANK = DecoderConfig(
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
)


def blank_model(num_logits: int, favourite: int | None = None) -> Mapping[str, bytes]:
    """Return the files of a blank model, as a mapping from name to content.

    Args:
        num_logits: size of the model's vocabulary.
        favourite: id of a token that is more likely than all others combined, or None.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_blank_model(Path(directory), num_logits, favourite)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def write_blank_model(directory: Path, num_logits: int, favourite: int | None = None) -> None:
    """Write `openvino_model.xml` and `.bin` for a one-layer Llama whose logits are 0, except that of `favourite`.

    The layer is needed because GenAI expects an attention layer with a cache, which it replaces with paged attention.
    """
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    likely = np.zeros((num_logits, _SIZE), np.float32)
    if favourite is not None:
        likely[favourite] = (3 + math.log(num_logits)) / _SIZE  # the hidden state multiplied by it contains only ones

    def matrix(name: str) -> Any:
        if name == "lm_head.weight":
            return ops.constant(likely)
        row = ops.constant(np.full((1, _SIZE), float(name == "model.embed_tokens.weight"), np.float32))
        rows = num_logits if name == "model.embed_tokens.weight" else _SIZE
        return ops.broadcast(row, np.array([rows, _SIZE]))

    graph = decoder_graph(_BLANK, matrix, lambda name: np.ones(_SIZE, np.float32))
    openvino.save_model(graph, directory / "openvino_model.xml", compress_to_fp16=False)


MASK_SECONDS = 0.05
"""Limit on the average CPU time, in seconds, to compute a step's allowed tokens. The whole batch waits for them."""

_SEEDS = (1, 2)  # one for each walk
_STEPS = 64  # of a walk, unless the steps become slower and slower
_MAX_STEPS = 200  # of a walk, also through an abridged grammar
_FEW_PARTS = 4  # from this number of parts on, walks through them are shorter
_TEMPERATURES = (1.0, 1.3)
"""Temperatures for walks through abridged grammars. With the first temperature, an allowed marker is nearly always
drawn, and with the second temperature, about half the time.
"""

_EVEN = 100.0  # the temperature at which all tokens are about equally likely

_FIRST = StructuredOutput("choice", '["a"]')
"""A choice to compile before a measurement, so that memory shared by all grammars is not counted."""


def genai_arguments(structured_output: StructuredOutput) -> dict[str, str]:
    """Return keyword arguments for `openvino_genai.StructuredOutputConfig`.

    Raises:
        ValueError: the schema or grammar is not supported by GenAI.
    """
    match structured_output.kind:
        case "json_schema":
            original = json.loads(structured_output.value)
            schema = with_plain_references(original)
            grammar = _grammar(schema)
            if grammar is not None:
                return {"grammar": grammar}
            return {"json_schema": structured_output.value if schema is original else json.dumps(schema)}
        case "json_object":
            return genai_arguments(StructuredOutput("json_schema", '{"type": "object"}'))
        case "regex":
            return {"grammar": f"root ::= {regex_grammar(structured_output.value)}"}
        case "grammar":
            return {"grammar": respelled(structured_output.value)}
        case "choice":
            choices = json.loads(structured_output.value)
            if any("\0" in choice for choice in choices):
                raise ValueError("xgrammar does not support NUL characters")  # it would ignore them
            return {"grammar": f"root ::= {choice_of(choices)}"}
        case "structural_tag":
            tag = json.loads(structured_output.value)
            tag["format"] = with_parts(tag["format"], _with_grammar)
            return {"structural_tags_config": json.dumps(tag, ensure_ascii=False)}
    raise ValueError(f"OpenVINO GenAI does not support structured output of the kind {structured_output.kind!r}")


def _grammar(schema: Any) -> str | None:
    """Convert a schema to our own grammar, or return None if only xgrammar's converter supports it.

    Raises:
        ValueError: neither converter supports the schema.
    """
    grammar = json_grammar(schema)
    # GenAI's xgrammar is not recent, but our own grammars do not need it: `json_grammar` refuses other keywords.
    keyword = ignored(schema, recent=grammar is not None)
    if keyword is None and grammar is None:
        keyword = unescaped_pattern(schema)
    if keyword is not None:
        raise ValueError(f"the schema's {keyword} is not supported by OpenVINO GenAI's xgrammar")
    if grammar is None and (text := next(filter(_may_be_misread, _texts(schema)), "")):
        raise ValueError(
            f"the schema's text {text!r} is not supported beside this schema's other keywords: OpenVINO GenAI's "
            "xgrammar would misread a Latin-1 letter before a digit or a letter from a to f"
        )
    if reference := cyclic_reference(schema):
        raise ValueError(f"the schema's reference {reference!r} is cyclic: it only refers back to itself")
    return grammar


def _may_be_misread(text: str) -> bool:
    return is_misread(text.replace("\\", "0"))  # a pattern's escape may stand for digits


def _texts(schema: Any) -> Iterator[str]:
    """Yield the texts that xgrammar's converter writes into a grammar: names, patterns and values."""
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as node:
                waiting += (value for name, value in node.items() if name != "description" or isinstance(value, dict))
                yield from node
            case list() as node:
                waiting += node
            case str() as text:
                yield text


def _with_grammar(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a part of a structural tag with our own grammar, if possible."""
    match part["type"]:
        case "json_schema":
            grammar = _grammar(part["json_schema"])
        case "regex":
            grammar = f"root ::= {regex_grammar(part['pattern'])}"
        case "grammar":
            grammar = respelled(part["grammar"])
        case "const_string" if is_misread(part["value"]):
            grammar = f"root ::= {literal(part['value'])}"
        case _:
            grammar = None
    return part if grammar is None else {"type": "grammar", "grammar": grammar}


class OpenVinoCheck:
    """A check that uses a blank model. See `engines.base.StructuredOutputCheck`.

    No threads start before the first compilation (`prepare`, `compile` or a call), so the process may fork until then.

    Args:
        config: the engine configuration, which specifies the model files.
        tokenizer: the model's tokenizer from GenAI, or None to load it.
    """

    def __init__(self, config: EngineConfig, tokenizer: Any = None) -> None:
        import openvino_genai

        model = config.model_path
        self._genai = openvino_genai
        self._tokenizer = openvino_genai.Tokenizer(str(model)) if tokenizer is None else tokenizer
        self._eos = eos_ids(config, self._tokenizer)
        self._num_logits = count_logits(model) or len(self._tokenizer.get_vocab())
        self._pipeline: Any = None  # made later, because a fork would lose its threads
        marker = self._tokenizer.get_vocab().get(MARKER.encode())
        self._model = blank_model(self._num_logits, marker)  # made now, because this takes longest

    def prepare(self) -> None:
        """Load shared data by compiling a small grammar. This takes 0.1 s. Ignore errors: `__call__` reports them."""
        with contextlib.suppress(Exception):
            self.compile(_FIRST)

    def __call__(self, structured_output: StructuredOutput) -> int:
        """Check a grammar. Return the number of bytes that GenAI will never free, because it caches compiled grammars.

        Raises:
            ValueError: the grammar is not supported by GenAI, or a step's allowed tokens take too long to compute.
        """
        parts = self._abridged(structured_output)
        self.compile(_FIRST)
        before = status_bytes("RssAnon")  # grows by at least the compiled grammar, as this process does nothing else
        self.compile(structured_output)
        num_bytes = max(status_bytes("RssAnon") - before, 0)
        ruled = without_text(structured_output)
        self.compile(ruled)  # so that the first walk does not measure it
        for seed in _SEEDS:
            self._walk(ruled, seed)
        for part in parts:
            try:
                self.compile(part)
            except ValueError:
                if part.kind == "regex" and structured_output.kind != "regex":
                    continue  # the part is a string that only looks like a pattern
                raise
            for temperature in _TEMPERATURES:
                self._walk(part, _SEEDS[0], _MAX_STEPS if len(parts) < _FEW_PARTS else _STEPS, temperature)
        return num_bytes

    def _abridged(self, structured_output: StructuredOutput) -> Sequence[StructuredOutput]:
        """Abridge a client's grammar, or the parts of a structural tag, so that short walks reach costly states.

        Raises:
            ValueError: a rule is cyclic, or the grammar has a syntax error.
        """
        if structured_output.kind == "structural_tag":
            parts = [part for each in contents(structured_output) for part in self._abridged(each)]
            return list(dict.fromkeys(parts))
        grammar = genai_arguments(structured_output).get("grammar")
        if structured_output.kind != "grammar":
            if grammar is not None:
                acyclic(grammar)
            return abridged_parts(structured_output)
        assert grammar is not None
        try:
            rules = acyclic(grammar)
        except InvalidGrammar:
            self.compile(structured_output)  # raises xgrammar's own message
            raise
        return [StructuredOutput("grammar", text) for text in rules.abridged()]

    def compile(self, structured_output: StructuredOutput) -> None:
        """Compile a schema or grammar for all pipelines with this tokenizer. This releases the GIL.

        Raises:
            ValueError: the schema or grammar is not supported by GenAI, or the model has no end token.
        """
        if not self._eos:
            raise ValueError("structured output needs an end token, which the model's files do not specify")
        try:
            # `generate` releases the GIL, which `step` would not.
            self._blank_pipeline().generate([self._prompt()], [self._config(structured_output, 0, max_new_tokens=1)])
        except RuntimeError as error:
            raise ValueError(_reason(error)) from None

    def _walk(
        self, structured_output: StructuredOutput, seed: int, steps: int = _STEPS, temperature: float = _EVEN
    ) -> None:
        """Time the first steps of a response, to check that its masks are computed fast enough.

        The mask of a state is computed only when the state is reached.

        Args:
            steps: number of steps after which the walk ends, unless the steps are getting slower.

        Raises:
            ValueError: a step takes too long, or is predicted to take too long in a long response.
        """
        pipeline = self._blank_pipeline()
        config = self._config(structured_output, seed, max_new_tokens=_MAX_STEPS, temperature=temperature)
        handle = pipeline.add_request(0, self._prompt(), config)
        pace = Pace(MASK_SECONDS)
        while pipeline.has_non_finished_requests():
            began = time.process_time()
            pipeline.step()
            pace.add(time.process_time() - began)
            if pace.is_slow or (len(pace) == steps and not pace.gets_slow):
                handle.cancel()
                pipeline.step()  # frees the request
                break
        pace.check(to_end=len(pace) == _MAX_STEPS)

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
        """Return a configuration for sampling. In the blank model, all tokens except the marker are equally likely."""
        config = self._genai.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature, rng_seed=seed
        )
        config.eos_token_id = min(self._eos)
        config.stop_token_ids = set(self._eos)
        config.structured_output_config = self._genai.StructuredOutputConfig(**genai_arguments(structured_output))
        return config


structured_output_check = OpenVinoCheck


def count_logits(model: Path) -> int | None:
    """Return the number of logits, which may exceed the vocabulary size. None if the model does not specify it."""
    import openvino

    if not model.is_dir():
        return None  # a GGUF file, whose logits have exactly the size of the vocabulary
    last = openvino.Core().read_model(language_model(model)).output("logits").get_partial_shape()[-1]
    return int(last.get_length()) if last.is_static else None


def _reason(error: RuntimeError) -> str:
    """Return xgrammar's message without its timestamp and source location."""
    text = re.sub(r"^\[[0-9:]+\] \S+: ", "", str(error).strip())
    return re.sub(r"^Check failed: .*? is false: ", "", text).strip()[:300]


# -- compile schemas and grammars on threads, so that no other request waits ------------------------------------------


_NICE = 10  # a thread's niceness, which lets token generation go first
_MAX_COMPILED = 1024
_SOON = 0.005  # seconds that a step waits for a compilation, enough for a grammar that GenAI has cached
_IDLE = 0.05  # seconds that a step waits if it has nothing else to do


class _Waiting(NamedTuple):
    key: int
    structured_output: StructuredOutput


class GrammarCompiler:
    """A queue of requests whose schemas or grammars are compiled one at a time. Not thread-safe.

    GenAI locks its compiled grammars during a compilation, and needs the same lock to start a request. Requests are
    therefore not started during a compilation, because the whole engine would have to wait. Between two compilations,
    all requests whose grammars have been compiled are started.

    Args:
        compile: function that compiles a schema or grammar, or raises ValueError. It is called on a separate thread.
    """

    def __init__(self, compile: Callable[[StructuredOutput], None]) -> None:
        self._compile = compile
        self._waiting = FairQueue[_Waiting]()
        self._current: tuple[_Waiting, Future[None]] | None = None
        self._compiled: OrderedDict[StructuredOutput, None] = OrderedDict()  # least recently used first

    def add(self, key: int, structured_output: StructuredOutput) -> None:
        self._waiting.put(sort(structured_output), _Waiting(key, structured_output))

    def cancel(self, key: int) -> None:
        """Remove a request from the queue. If its compilation has started, the compilation continues."""
        self._waiting.drop(lambda waiting: waiting.key == key)

    def step(self, *, idle: bool) -> list[tuple[int, str]]:
        """Return the keys of requests whose compilation has ended, each with an error message, or "" if it succeeded.

        The result may include a request that was cancelled during its compilation.

        Args:
            idle: whether the engine has no other requests to process.
        """
        ready: list[tuple[int, str]] = []
        patience = 0.0  # seconds; only the step that starts a compilation waits, so that others are not delayed
        while True:
            if self._current is None:
                ready += [(key, "") for key in self._take_compiled()]
                if ready or not self._waiting or (following := self._waiting.get()) is None:
                    break
                self._current = following, self._start(following.structured_output)
                patience = _SOON
            (key, structured_output), compilation = self._current
            if not futures.wait([compilation], _IDLE if idle else patience).done:
                break
            self._current = None
            error = compilation.exception()
            ready.append((key, "" if error is None else str(error) or type(error).__name__))
            if error is None:
                self._compiled[structured_output] = None
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return ready

    def _take_compiled(self) -> list[int]:
        """Remove the requests whose grammars have been compiled, and return their keys."""
        keys: list[int] = []

        def is_compiled(waiting: _Waiting) -> bool:
            if waiting.structured_output not in self._compiled:
                return False
            self._compiled.move_to_end(waiting.structured_output)
            keys.append(waiting.key)
            return True

        self._waiting.drop(is_compiled)
        return keys

    def _start(self, structured_output: StructuredOutput) -> Future[None]:
        compilation: Future[None] = Future()  # GenAI may raise anything; only this request must fail
        work = partial(settle, compilation, partial(self._run, structured_output))
        threading.Thread(target=work, name="guides", daemon=True).start()
        return compilation

    def _run(self, structured_output: StructuredOutput) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # xgrammar's threads inherit it
        self._compile(structured_output)
