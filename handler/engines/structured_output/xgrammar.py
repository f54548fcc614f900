"""The installed xgrammar: its rules of a schema, an expression or a structural tag, and a trial of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from handler.core.values import StructuredOutput
from handler.engines.structured_output.ebnf import MARKER, acyclic

_PLACE = re.compile(r"^(\[[\d:]+\] \S+: )?")
_FAILED = re.compile(r"Check failed: .*? is false: ?", re.DOTALL)


def ebnf(kind: str, text: str) -> str:
    """Write a text's rules in xgrammar's EBNF.

    Args:
        kind: JSON, JSON_OBJECT, REGEX, GRAMMAR or STRUCTURAL_TAG, as vLLM names them.

    Raises:
        ValueError: xgrammar cannot follow it.
    """
    from xgrammar import Grammar

    try:
        match kind:
            case "GRAMMAR":
                return text if "::=" in text else str(Grammar.from_lark(text))
            case "REGEX":
                return str(Grammar.from_regex(text))
            case "STRUCTURAL_TAG":
                tag = json.loads(text)
                return str(Grammar.from_structural_tag(tag))
        return str(Grammar.from_json_schema(text if kind == "JSON" else '{"type": "object"}'))
    except Exception as error:
        raise ValueError(said(error)) from None


def has_own_rules(kind: str, text: str) -> bool:
    """Return whether a client wrote rules, which may be costly: xgrammar's own rules of a schema are not."""
    return kind in ("REGEX", "GRAMMAR") or any(name in text for name in ('"pattern', '"grammar"', '"regex"'))


def said(error: Exception) -> str:
    """Say what xgrammar found, without the place in its source; a failed check of its own has no words for a client."""
    text = _FAILED.sub("", _PLACE.sub("", str(error).strip()))
    if "Check failed" in str(error) and not text.strip():
        return "xgrammar cannot compile it"
    return text


class XgrammarCheck:
    """Compiles texts with a checkpoint's vocabulary, and makes the masks of their first tokens, as an engine would.

    Args:
        model: a directory with a tokenizer.
    """

    def __init__(self, model: Path, *, trust_remote_code: bool = False) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=trust_remote_code)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._walker = Walker(
            tokenizer.get_vocab(),
            info.vocab_size,
            xgrammar.allocate_token_bitmask(1, info.vocab_size),
            lambda matcher, mask: matcher.fill_next_token_bitmask(mask),
            lambda matcher, id: matcher.accept_token(id) and not matcher.is_terminated(),
        )

    def __call__(self, kind: str, text: str) -> None:
        """Try a text.

        Args:
            kind: as in `ebnf`.

        Raises:
            ValueError: a rule is cyclic, xgrammar cannot follow the text, or a step takes too long.
        """
        written = ebnf(kind, text)
        rules = acyclic(written)
        self._walker.start(self._matchers(written))
        if has_own_rules(kind, text):
            for abridged in rules.abridged():
                self._walker.abridged(self._matchers(abridged))

    def _matchers(self, rules: str) -> Any:
        try:
            return partial(self._xgrammar.GrammarMatcher, self._compiler.compile_grammar(rules))
        except Exception as error:
            raise ValueError(said(error)) from None


# -- the parts of structural tags (xgrammar's documentation) -----------------------------------------------------------


Tag = Mapping[str, Any]


def with_schemas(tag: Tag, replace: Callable[[Tag], Tag]) -> Tag:
    """Return a tag's format with each part that is a JSON schema replaced."""
    if tag["type"] == "json_schema":
        return replace(tag)
    parts: dict[str, Any] = {
        name: [with_schemas(part, replace) for part in tag[name]] for name in ("elements", "tags") if name in tag
    }
    if "content" in tag:
        parts["content"] = with_schemas(tag["content"], replace)
    return {**tag, **parts}


def contents(structured_output: StructuredOutput) -> Iterator[StructuredOutput]:
    """Give each schema, expression and grammar of a structural tag as structured output of its own."""
    waiting = [json.loads(structured_output.value)["format"]]
    while waiting:
        tag = waiting.pop()
        match tag["type"]:
            case "json_schema" | "qwen_xml_parameter":
                yield StructuredOutput("json_schema", json.dumps(tag["json_schema"], ensure_ascii=False))
            case "regex":
                yield StructuredOutput("regex", tag["pattern"])
            case "grammar":
                yield StructuredOutput("grammar", tag["grammar"])
        waiting += [part for name in ("elements", "tags") for part in tag.get(name, ())]
        waiting += [tag["content"]] if "content" in tag else []


def without_text(structured_output: StructuredOutput) -> StructuredOutput:
    """Return the rule without the text that may come before what it rules."""
    if not structured_output.allows_text:
        return structured_output
    tag = json.loads(structured_output.value)
    tag["format"]["at_least_one"] = True
    return StructuredOutput(structured_output.kind, json.dumps(tag, ensure_ascii=False))


# -- follow a matcher through answers, and refuse one whose steps take too long ----------------------------------------
# A matcher finds the allowed tokens of each step, while all requests of the engine wait. Some do most of their work
# only then. So a check draws tokens as a model might, and measures CPU time.

STEP_SECONDS = 0.01
"""CPU time of a step, averaged over a few, or ten times as much once. Ordinary texts took up to 0.0003, once 0.01; an
ambiguous grammar takes seconds after ten or twenty tokens."""

_WINDOW = 8  # tokens of the average
_STEPS = 64  # tokens with many alternatives, unless they become slower; those with few, as in a literal, cost little
_MOST_STEPS = 200  # the same, also of an abridged grammar
_FORCED_STEPS = 512
_FEW = 64
_WALK_SECONDS = 0.5
_ANSWER = 2000  # tokens, by which steps that become slower and slower must not have become too slow
_ABRIDGED = 3  # times as much may a step of an abridged grammar take: it is more ambiguous than its original
_SHARES = (0.5, 0.9)  # of an abridged grammar's steps, those that take the marker where it is allowed


class Walker:
    """Walks through answers.

    Args:
        vocabulary: each token's text, with its id.
        size: ids that a mask has.
        mask: a torch tensor of one row, into which matchers write a bit for each id.
        fill: writes the tokens that a matcher allows now into the mask.
        accept: moves a matcher on by a token; False where the answer ends.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        size: int,
        mask: Any,
        fill: Callable[[Any, Any], object],
        accept: Callable[[Any, int], bool],
    ) -> None:
        import numpy as np

        self._mask, self._fill, self._accept = mask, fill, accept
        self._lengths = np.zeros(size, np.int32)
        for token, id in vocabulary.items():
            if id < size:
                self._lengths[id] = len(token)
        self._marker = vocabulary.get(MARKER)

    def start(self, make: Callable[[], Any]) -> None:
        """Walk through a text's first tokens: random ones, then long ones.

        Args:
            make: returns a matcher in its first state.

        Raises:
            ValueError: the steps take too long.
        """
        for longest in (False, True):
            self._walk(make(), longest=longest)

    def abridged(self, make: Callable[[], Any]) -> None:
        """Walk through an abridged grammar, past its long parts and through them; see `start`."""
        for share in _SHARES:
            self._walk(make(), marked=share, steps=_MOST_STEPS)

    def _walk(self, matcher: Any, *, longest: bool = False, marked: float = 0.0, steps: int = _STEPS) -> None:
        """Make the masks of an answer's first tokens.

        Args:
            longest: choose the longest of many allowed tokens, else a random one.
            marked: the share of steps that take the marker where it is allowed.
            steps: tokens with many alternatives; more where they become slower.
        """
        import numpy as np

        limit = STEP_SECONDS * (_ABRIDGED if marked else 1)
        draw, times = np.random.default_rng(0), list[float]()
        began, free, forced = time.process_time(), 0, 0
        while free < _MOST_STEPS and forced < _FORCED_STEPS and time.process_time() - began < _WALK_SECONDS:
            before = time.process_time()
            self._fill(matcher, self._mask)
            spent = time.process_time() - before
            bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._lengths)])
            if not len(allowed):
                return
            if free == steps and forecast(times, _ANSWER) < 5 * STEP_SECONDS:
                return
            few = len(allowed) <= _FEW
            forced, free = forced + few, free + (not few)
            if self._marker is not None and marked and bits[self._marker] and draw.random() < marked:
                id = self._marker
            elif few or longest:
                id = allowed[self._lengths[allowed].argmax()]
            else:
                id = draw.choice(allowed)
            before = time.process_time()
            goes_on = self._accept(matcher, int(id))
            times.append(spent + time.process_time() - before)
            if times[-1] > 10 * limit or sum(times[-_WINDOW:]) > _WINDOW * limit:
                raise ValueError(f"each token takes the engine more than {limit:g} s")
            if not goes_on:
                return
        if free == _MOST_STEPS and forecast(times, _ANSWER) > 5 * STEP_SECONDS:
            raise ValueError(f"after {_ANSWER} tokens, each takes the engine more than {5 * STEP_SECONDS:g} s")


def forecast(seconds: Sequence[float], number: int) -> float:
    """Continue a line through the middles of a walk's second and last quarter to step `number`."""
    quarter = len(seconds) // 4
    early, late = median(seconds[quarter : 2 * quarter]), median(seconds[-quarter:])
    return late + (late - early) / (2 * quarter) * (number - len(seconds))
