"""A guide tried without its model, and what a slow one does to the others in a batch."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.values import Sampling, StructuredOutput
from handler.engines import openvino
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.openvino.engine import OpenVino, structured_output_check
from handler.engines.openvino.structured_output import OpenVinoCheck, genai_arguments

pytestmark = pytest.mark.model

WORDS = " ".join(f"w{n}?" for n in range(100)), "\n".join(f'w{n} ::= [a-z]+ " "' for n in range(100))


def tag(content: dict[str, Any]) -> StructuredOutput:
    value = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    return StructuredOutput("structural_tag", json.dumps(value))


SLOW = StructuredOutput("regex", ".{0,60}")
"""Half a second's compiling."""


@pytest.fixture(scope="module")
def trial(model: Path) -> OpenVinoCheck:
    return structured_output_check(EngineConfig(model=model))


@pytest.mark.parametrize(
    "structured_output",
    [
        StructuredOutput(
            "json_schema", '{"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}'
        ),
        StructuredOutput("json_object", ""),
        StructuredOutput("regex", r"^\d{3}-[a-zà-ÿ]+$"),
        StructuredOutput("grammar", 'root ::= [a-z]+ ("," root)?'),
        StructuredOutput("choice", '["a", "b"]'),
    ],
    ids=lambda structured_output: structured_output.kind,
)
def test_honest_guides_pass(trial: OpenVinoCheck, structured_output: StructuredOutput) -> None:
    trial(structured_output)


@pytest.mark.parametrize(
    ("structured_output", "why"),
    [
        (StructuredOutput("regex", "(?=a)b"), "Lookahead is not supported"),
        (StructuredOutput("regex", r"\p{L}"), "Unicode character class"),
        (StructuredOutput("regex", r"(a)\1"), "Backreference is not supported"),
        (StructuredOutput("grammar", "root ::= missing"), 'Rule "missing" is not defined'),
        (StructuredOutput("grammar", 'start: "a"'), "Unexpected character"),
        (StructuredOutput("json_schema", '{"type": "foo"}'), 'Unsupported type "foo"'),
        (
            StructuredOutput("json_schema", '{"type": "object", "minProperties": 3, "maxProperties": 2}'),
            "maxProperties",
        ),
        (
            StructuredOutput("json_schema", '{"type": "integer", "multipleOf": 2}'),
            "the schema's multipleOf is not supported",
        ),
        (StructuredOutput("grammar", 'root ::= s\ns ::= s s s s | [a-z] | ""'), "the rule 's' is cyclic"),
        (StructuredOutput("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "string"}]}'), "is cyclic"),
        (StructuredOutput("grammar", "root ::= [a-z]{300} s\ns ::= s s | [a-z]"), "takes the engine more than"),
        *(
            pytest.param(StructuredOutput("grammar", text), "takes the engine more than", marks=pytest.mark.nightly)
            for text in (
                "root ::= [a-z]{300} y+\ny ::= z+\nz ::= [a-z]+",
                f"root ::= [a-z]{{300}} {WORDS[0]}\n{WORDS[1]}",
                f'root ::= [^.]* "." {WORDS[0]}\n{WORDS[1]}',
                "root ::= [a-z]{300} s\ns ::= [a-z] s [a-z] | [a-z]",
            )
        ),
        (tag({"type": "grammar", "grammar": 'root ::= s\ns ::= s s s s | [a-z] | ""'}), "the rule 's' is cyclic"),
        (tag({"type": "regex", "pattern": "[a-z]{300}(([a-z]+ ?)+,?)+"}), "takes the engine more than"),
        (tag({"type": "json_schema", "json_schema": {"anyOf": [{"$ref": "#"}, {"type": "string"}]}}), "is cyclic"),
        (
            StructuredOutput("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "string", "pattern": "a"}]}'),
            "the schema's reference '#' is cyclic",
        ),
    ],
    ids=lambda value: value.value[:20] if isinstance(value, StructuredOutput) else "",
)
def test_what_cannot_be_followed_is_refused_in_xgrammars_words(
    trial: OpenVinoCheck, structured_output: StructuredOutput, why: str
) -> None:
    with pytest.raises(ValueError, match=why) as refusal:
        trial(structured_output)
    assert "xgrammar-src" not in str(refusal.value)
    trial(StructuredOutput("choice", '["it", "goes", "on"]'))


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_an_expression_cannot_hide_a_costly_loop(trial: OpenVinoCheck, kind: str) -> None:
    def text(expression: str) -> StructuredOutput:
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": expression}}, "required": ["a"]}
        return StructuredOutput(kind, expression if kind == "regex" else json.dumps(schema))

    trial(text("([A-Z]{2}-)+[0-9]{4}"))
    with pytest.raises(ValueError, match="takes the engine more than"):
        trial(text("[a-z]{300}(([a-z]+ ?)+,?)+"))


def test_a_grammar_of_many_loops_is_followed(trial: OpenVinoCheck) -> None:
    trial(
        StructuredOutput(
            "grammar",
            "root ::= ws value ws\nvalue ::= object | array | string | number\nws ::= [ \\n]*\n"
            'object ::= "{" (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? "}"\n'
            'array ::= "[" (value ("," value)*)? "]"\nnumber ::= [0-9]+ ("." [0-9]+)?\n'
            'string ::= "\\"" ([^"\\\\] | "\\\\" [a-z])* "\\""',
        )
    )


def test_a_kind_that_is_none_is_no_guide() -> None:
    with pytest.raises(ValueError, match="does not support structured output of the kind 'lark'"):
        genai_arguments(StructuredOutput("lark", ""))


def test_a_choice_with_nul_is_refused_as_xgrammar_leaves_it_out() -> None:
    with pytest.raises(ValueError, match="NUL"):
        genai_arguments(StructuredOutput("choice", '["a", "b\\u0000"]'))


def test_without_an_end_token_there_are_no_guides(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino.structured_output, "eos_ids", lambda *_: frozenset())
    with pytest.raises(ValueError, match="needs an end token"):
        OpenVinoCheck(EngineConfig(model=model))(StructuredOutput("choice", '["a"]'))


def try_in_copies(model: Path, guides: tuple[StructuredOutput, ...], answers: Any) -> None:
    trial = structured_output_check(EngineConfig(model=model))
    for guide in guides:
        copy = multiprocessing.get_context("fork").Process(target=try_in_a_copy, args=(trial, guide, answers))
        copy.start()
        copy.join()
        assert copy.exitcode == 0


def try_in_a_copy(trial: OpenVinoCheck, guide: StructuredOutput, answers: Any) -> None:
    try:
        answers.put(trial(guide))
    except ValueError as error:
        answers.put(str(error))


def tried(model: Path, *guides: StructuredOutput) -> list[Any]:
    """Return what a check says of each in a copy of the process that made it, as `engines/process/sandbox.py` does.

    Threads do not come along with a fork, so the process is another than this one, whose threads may hold locks.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=try_in_copies, args=(model, guides, answers))
    process.start()
    process.join(60)
    process.kill()  # where it hangs
    process.join()
    assert process.exitcode == 0
    return [answers.get() for _ in guides]


def test_a_copy_of_the_process_that_made_it_can_try(model: Path) -> None:
    passed, refused = tried(model, StructuredOutput("choice", '["a"]'), StructuredOutput("regex", "(?=a)"))
    assert isinstance(passed, int)
    assert "Lookahead" in refused


def test_what_the_engine_will_keep_of_a_guide_is_measured(model: Path) -> None:
    """A usual schema's half a megabyte, or nothing where it fits what the process had free; and an expression's that
    takes half a second."""
    fields = {f"field_{n}": {"type": "string"} for n in range(5)}
    schema = {"type": "object", "properties": fields, "required": ["field_0"]}
    usual, slow = tried(model, StructuredOutput("json_schema", json.dumps(schema)), SLOW)
    assert 0 <= usual < 3 << 20
    assert 1 << 20 <= slow < 30 << 20


# -- in the engine -----------------------------------------------------------------------------------------------


def run(engine: OpenVino, wanted: int) -> dict[int, list[int]]:
    """Steps until as many requests have ended; the ids of each."""
    found: dict[int, list[int]] = {}
    ended: set[int] = set()
    while len(ended) < wanted:
        step = engine.step()
        for key, id in zip(step.keys, step.ids, strict=True):
            found.setdefault(key, []).append(id)
        for output in step.others:
            assert output.error is None
            found.setdefault(output.key, []).extend(output.ids)
            if output.finish is not None:
                ended.add(output.key)
    return found


@pytest.fixture(scope="module")
def engine(model: Path) -> OpenVino:
    return OpenVino(EngineConfig(Config(max_rolling_batch_size=8, kv_cache_gib=1), model=model))


def test_the_others_go_on_while_a_guide_is_compiled(engine: OpenVino) -> None:
    engine.add(EngineRequest(1, [1, 2, 3], Sampling(max_new_tokens=2000, ignore_eos=True)))
    engine.step()
    engine.add(EngineRequest(2, [1, 2, 3], Sampling(max_new_tokens=4, structured_output=SLOW)))
    meanwhile, begun = 0, False
    deadline = time.monotonic() + 30
    while not begun and time.monotonic() < deadline:
        step = engine.step()
        meanwhile += step.keys.count(1)
        begun = 2 in step.keys
    assert begun
    assert meanwhile > 5
    engine.cancel(1)
    engine.cancel(2)


def test_a_guide_that_is_known_is_ready_in_the_step_in_which_it_comes(engine: OpenVino) -> None:
    structured_output = StructuredOutput("choice", '["yes", "no"]')
    engine.add(EngineRequest(3, [1, 2, 3], Sampling(max_new_tokens=5, structured_output=structured_output)))
    run(engine, 1)
    engine.add(EngineRequest(4, [1, 2, 3], Sampling(max_new_tokens=5, structured_output=structured_output)))
    assert engine.step().keys == [4]
    run(engine, 1)


def test_a_guided_prompt_can_be_scored_too(engine: OpenVino) -> None:
    structured_output = StructuredOutput("choice", '["yes", "no"]')
    engine.add(
        EngineRequest(
            5, [1, 2, 3], Sampling(max_new_tokens=5, structured_output=structured_output, prompt_logprobs=True)
        )
    )
    scores: list[Any] = []
    ended = False
    while not ended:
        for output in engine.step().others:
            scores += output.prompt_logprobs or []
            ended = ended or output.finish is not None
    assert len(scores) == 3


@pytest.mark.parametrize("beside", [{"num_beams": 2}, {"ignore_eos": True}, {"min_new_tokens": 3}], ids=json.dumps)
def test_what_a_guide_excludes_is_refused(engine: OpenVino, beside: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="structured output cannot be combined"):
        engine.add(EngineRequest(6, [1, 2, 3], Sampling(structured_output=SLOW, **beside)))


def test_the_trial_leaves_no_files(trial: OpenVinoCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(trial, "_pipeline", None)
    trial(StructuredOutput("choice", '["a"]'))
    assert os.listdir(tmp_path) == []
