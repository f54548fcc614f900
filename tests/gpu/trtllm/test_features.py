"""The adapter on the double: what only some versions, samplers and options have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import Adapter, Finish, StructuredOutput
from tests.adapter_files import write_adapter
from tests.doubles.reference import reference
from tests.gpu.trtllm.cases import PROMPT, Loaded, joined, loaded, one_eos

TRTLLM = {"sampler_type": "TRTLLMSampler"}


@pytest.fixture
def newest(model: Path) -> Iterator[Loaded]:
    more = {"gather_generation_logits": True, "guided_decoding_backend": "xgrammar", "max_beam_width": 4}
    with loaded(model, "version=1.3.0", engine_options=more) as found:
        yield found


@pytest.fixture
def other(model: Path) -> Iterator[Loaded]:
    """1.2 with the sampler that has penalties and no log-probabilities."""
    with loaded(model, engine_options=TRTLLM) as found:
        yield found


def test_logits(newest: Loaded) -> None:
    ids = newest.tokenizer.encode(PROMPT).ids
    answer = newest.one(return_context_logits=True, return_generation_logits=True, max_new_tokens=3, ignore_eos=True)
    (output,) = answer.outputs
    assert output.extras is not None
    assert output.extras.context_logits is not None
    assert output.extras.generation_logits is not None
    assert [len(output.extras.context_logits), len(output.extras.generation_logits)] == [len(ids), 3]
    model = newest.double.model
    assert output.extras.context_logits[-1] == pytest.approx(model.logits(ids).tolist())
    assert output.extras.generation_logits[1] == pytest.approx(model.logits([*ids, answer.ids[0]]).tolist())


@pytest.mark.parametrize("which", ["newest", "other"])
def test_penalties_act(which: str, request: pytest.FixtureRequest) -> None:
    found: Loaded = request.getfixturevalue(which)
    plain = found.one(ignore_eos=True, max_new_tokens=100).ids
    most = max(plain, key=plain.count)
    assert plain.count(most) > 2
    penalties: dict[str, Any] = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 3.0}
    for name, value in penalties.items():
        assert found.one(ignore_eos=True, max_new_tokens=100, **{name: value}).ids != plain, name
    once = found.one(ignore_eos=True, max_new_tokens=60, no_repeat_ngram_size=1).ids
    assert len(set(once)) == 60


def test_forbidden_words(other: Loaded) -> None:
    whole = other.text(max_new_tokens=30)
    word = whole[4:9]
    ids = other.tokenizer.encode(word).ids
    text = other.one(max_new_tokens=60, bad_sequences=(word,)).ids
    assert not any(text[at : at + len(ids)] == ids for at in range(len(text)))


def test_forbidden_words_without_an_end(model: Path, tmp_path: Path) -> None:
    with loaded(one_eos(model, tmp_path / "one"), engine_options=TRTLLM) as found:
        plain = found.one(ignore_eos=True, max_new_tokens=40).ids
        assert found.one(bad_sequences=("zzz",), ignore_eos=True, max_new_tokens=40).ids == plain
        stopped = found.one(bad_sequences=("zzz",), ignore_eos=True, max_new_tokens=40, stop_token_ids=(plain[5],))
        assert (stopped.ids, stopped.finish) == (plain[: plain.index(plain[5]) + 1], Finish.STOP)


def test_the_sampler_without_log_probabilities_says_none(other: Loaded) -> None:
    answer = other.one(max_new_tokens=5, ignore_eos=True)
    assert answer.logprobs == [None] * 5


@pytest.mark.parametrize("manners", ["version=1.2.1", "version=1.3.0"])
def test_beams_come_at_the_end_the_best_first(model: Path, manners: str) -> None:
    with loaded(model, manners, engine_options={"max_beam_width": 4}) as found:
        greedy = found.one(ignore_eos=True, max_new_tokens=8).ids
        outputs = found.run(key := found.add(num_beams=4, max_new_tokens=8, ignore_eos=True))[key]
        assert [output.sequence for output in outputs] == [0, 1, 2, 3]
        assert all(output.finish for output in outputs)
        totals = [sum(logprob or 0.0 for logprob in output.logprobs) for output in outputs]
        assert totals == sorted(totals, reverse=True)
        model_logits = found.double.model
        assert len({tuple(output.ids) for output in outputs}) == 4
        assert outputs[0].ids == greedy or totals[0] > _total(model_logits, found.tokenizer.encode(PROMPT).ids, greedy)
        ends = {
            tuple(found.run(key := found.add(num_beams=4, max_new_tokens=40, length_penalty=penalty))[key][0].ids)
            for penalty in (0.0, 1.0, 5.0)
        }
        assert len(ends) > 1


def _total(model: object, prompt: list[int], ids: list[int]) -> float:
    return float(sum(reference(model, [*prompt, *ids])[len(prompt) - 1 :]))


@pytest.mark.parametrize(
    ("structured_output", "allowed"),
    [
        (StructuredOutput("choice", '["yes.", "no (or not)"]'), r"yes\.|no \(or not\)"),
        (StructuredOutput("regex", r"[0-9]{3}-(a|b)"), r"[0-9]{3}-(a|b)"),
        (StructuredOutput("grammar", 'root ::= "left" | "right"'), "left|right"),
        (StructuredOutput("json_object", ""), r"\{.*\}"),
    ],
)
def test_a_guide_holds(newest: Loaded, structured_output: StructuredOutput, allowed: str) -> None:
    assert re.fullmatch(allowed, newest.text(structured_output=structured_output, max_new_tokens=60))


def test_a_json_schema_holds(newest: Loaded) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    found = json.loads(
        newest.text(structured_output=StructuredOutput("json_schema", json.dumps(schema)), max_new_tokens=60)
    )
    assert set(found) == {"name", "age"}


def test_a_guide_that_the_engine_cannot_use_ends_its_request_alone(newest: Loaded) -> None:
    alone = newest.one().ids
    broken, good = newest.add(structured_output=StructuredOutput("regex", "(")), newest.add()
    found = newest.run(broken, good)
    assert "the regular expression is not valid" in (found[broken][-1].error or "")
    assert joined(found[good]).ids == alone


def test_nothing_that_a_client_may_say_ends_the_engine(newest: Loaded) -> None:
    alone = newest.one(ignore_eos=True).ids
    wild: dict[str, Any] = {"do_sample": True, "ignore_eos": True}
    asked: dict[str, Any]
    for asked in ({"temperature": 1e-38}, {"top_k": 10**6}, {"temperature": 3e38}, {"min_p": 1.0, "top_p": 1e-38}):
        assert newest.one(**{**wild, **asked}).finish is Finish.LENGTH, asked
    ids = tuple(newest.tokenizer.encode("left").ids)
    forbidden = newest.one(
        structured_output=StructuredOutput("choice", '["left"]'), bad_token_ids=ids, max_new_tokens=20
    )
    assert forbidden.finish is Finish.EOS  # what both allows and forbids lets through what it must
    for asked in ({"ignore_eos": True}, {"min_new_tokens": 3}):
        with pytest.raises(ValueError, match="exclude each other"):
            newest.add(structured_output=StructuredOutput("choice", '["left"]'), **asked)
    assert newest.one(ignore_eos=True).ids == alone


def test_adapters(model: Path, tmp_path: Path) -> None:
    good, large = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "large", r=64)
    with loaded(model, "version=1.3.0", engine_options={"enable_lora": True, "max_lora_rank": 16}) as found:
        adapter = Adapter("good", 1, str(good))
        found.engine.load_adapter(adapter)
        plain = found.one(ignore_eos=True).ids
        assert found.one(adapter=adapter, ignore_eos=True).ids != plain
        found.engine.drop_adapter(adapter)
        with pytest.raises(ValueError, match=r"rank is 64; option\.max_lora_rank=16"):
            found.engine.load_adapter(Adapter("large", 2, str(large)))
        with pytest.raises(FileNotFoundError, match=r"gone/adapter_config\.json"):
            found.add(adapter=Adapter("gone", 4, str(tmp_path / "gone")))
        assert found.one(ignore_eos=True).ids == plain
    with loaded(model, "version=1.3.0") as found:
        assert "LoRA is not enabled" in (found.one(adapter=adapter).error or "")


def test_an_adapter_that_was_not_loaded_before_is_looked_at_with_its_first_request(model: Path, tmp_path: Path) -> None:
    """One registered with preload=false, or any after a restart."""
    large = Adapter("large", 1, str(write_adapter(tmp_path / "large", r=64)))
    with loaded(model, "version=1.3.0", engine_options={"enable_lora": True, "max_lora_rank": 16}) as found:
        with pytest.raises(ValueError, match=r"rank is 64; option\.max_lora_rank=16"):
            found.add(adapter=large)
        good = write_adapter(tmp_path / "good")
        adapter = Adapter("good", 2, str(good))
        assert found.one(adapter=adapter).finish
        (good / "adapter_config.json").rename(good / "gone")  # it is looked at once, not with every request
        key = found.add(adapter=adapter)
        found.engine.cancel(key)
        found.engine.drop_adapter(adapter)
        with pytest.raises(FileNotFoundError):
            found.add(adapter=adapter)


def test_an_adapter_without_a_rank_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = Adapter("none", 1, str(write_adapter(tmp_path / "none", r=None)))
    with (
        loaded(model, "version=1.3.0", engine_options={"enable_lora": True, "max_lora_rank": 16}) as found,
        pytest.raises(ValueError, match="rank is None"),
    ):
        found.engine.load_adapter(adapter)
