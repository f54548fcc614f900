"""The adapter on the double, in every version that it is written for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.values import Adapter, Finish, StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.trtllm import engine as trtllm
from handler.engines.trtllm.arguments import leave_mpi
from tests.doubles import tiny, using
from tests.doubles.using import reference
from tests.gpu.trtllm.cases import PROMPT, Loaded, joined, loaded, one_eos
from tests.user_files import write_adapter

VERSIONS = ("1.0.0", "1.1.0", "1.2.1", "1.3.0rc29")


@pytest.fixture(scope="module", params=VERSIONS)
def each(request: pytest.FixtureRequest, model: Path) -> Iterator[Loaded]:
    with loaded(model, f"version={request.param}") as found:
        yield found


# -- every version -----------------------------------------------------------------------------------------------


def test_greedy_is_the_most_likely_token_each_time(each: Loaded) -> None:
    answer = each.one(ignore_eos=True)
    model, ids = each.double.model, each.tokenizer.encode(PROMPT).ids
    wanted: list[int] = []
    for _ in range(12):
        wanted.append(int(model.logits([*ids, *wanted]).argmax()))
    assert (answer.ids, answer.finish) == (wanted, Finish.LENGTH)
    assert all(logprob is not None and logprob <= 0 for logprob in answer.logprobs)


def test_an_end_is_the_last_token(each: Loaded) -> None:
    answer = each.one(max_new_tokens=200)
    assert answer.finish is Finish.EOS
    assert answer.ids[-1] in each.eos
    assert len(answer.logprobs) == len(answer.ids)
    assert each.one(max_new_tokens=len(answer.ids) + 5, ignore_eos=True).finish is Finish.LENGTH


def test_both_eos_ids_end_an_answer_as_such(each: Loaded) -> None:
    ends = set()
    for number in range(40):
        answer = each.one(f"{number} people", max_new_tokens=200)
        assert answer.finish is Finish.EOS
        ends.add(answer.ids[-1])
    assert ends == {3}  # the model ends with its first; the other one is forced below
    forced = each.one(max_new_tokens=9, logit_bias=((4, 100.0),))
    assert (forced.ids, forced.finish) == ([4], Finish.EOS)


def test_a_stop_id_is_the_last_token_and_told_from_an_eos(each: Loaded) -> None:
    whole = each.one(ignore_eos=True).ids
    answer = each.one(stop_token_ids=(whole[3],))
    assert (answer.ids, answer.finish) == (whole[: whole.index(whole[3]) + 1], Finish.STOP)
    assert None not in answer.logprobs
    eos = each.one(stop_token_ids=(3,), max_new_tokens=200)
    assert (eos.ids[-1], eos.finish) == (3, Finish.STOP)  # the client asked for it as a stop id


def test_a_least_length_holds_back_eos_and_stops(each: Loaded) -> None:
    plain = each.one(max_new_tokens=200)
    least = len(plain.ids) + 3
    late = each.one(max_new_tokens=200, min_new_tokens=least)
    assert len(late.ids) >= least
    whole = each.one(ignore_eos=True, max_new_tokens=60).ids
    held = each.one(max_new_tokens=9, min_new_tokens=4, logit_bias=((3, 1000.0),))
    assert (len(held.ids), held.ids.index(3), held.finish) == (5, 4, Finish.EOS)
    stopped = each.one(ignore_eos=True, max_new_tokens=60, min_new_tokens=5, stop_token_ids=(whole[2], whole[9]))
    at = next(at for at, id in enumerate(whole) if at >= 5 and id in (whole[2], whole[9]))
    assert (stopped.ids, stopped.finish) == (whole[: at + 1], Finish.STOP)


def test_the_eos_that_a_least_length_keeps_from_coming_is_the_tokenizers(model: Path, tmp_path: Path) -> None:
    turns = tiny.ending_with(model, tmp_path / "turns", "<|end|>")  # as Llama 3 Instruct does: not its first EOS
    with loaded(turns) as found:
        held = found.one(max_new_tokens=9, min_new_tokens=4, logit_bias=((4, 1000.0),))
        assert (len(held.ids), held.ids.index(4), held.finish) == (5, 4, Finish.EOS)
        other = found.one(max_new_tokens=9, min_new_tokens=4, logit_bias=((3, 1000.0),))
        assert (other.ids, other.finish) == ([3] * 5, Finish.EOS)  # it comes, and ends nothing before
        for eos in (3, 4):
            forced = found.one(max_new_tokens=9, logit_bias=((eos, 1000.0),))
            assert (forced.ids, forced.finish) == ([eos], Finish.EOS)


def test_log_probabilities_that_nobody_wants_are_not_asked_for(each: Loaded) -> None:
    asked: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 5}
    wanted = each.one(**asked)
    assert None not in wanted.logprobs
    plain = each.one(**asked, logprobs=False)
    assert (plain.ids, plain.logprobs) == (wanted.ids, [None] * 5)
    tops = each.one(**asked, logprobs=False, top_logprobs=2)
    assert tops.logprobs == wanted.logprobs


def test_seeds_where_the_version_has_them_else_refused_by_name(each: Loaded) -> None:
    asked: dict[str, Any] = {"do_sample": True, "seed": 5, "ignore_eos": True}
    first, again, otherwise = (each.one(**{**asked, "seed": seed}).ids for seed in (5, 5, 6))
    assert first != otherwise
    assert (first == again) == ("seed" not in each.unsupported)


def test_sampling_parameters_act(each: Loaded) -> None:
    most_likely = each.one(ignore_eos=True).ids
    for change in ({"top_p": 0.01}, {"temperature": 0.001}, {"top_k": 1}, {"temperature": 0.0}, {"top_p": 0.0}):
        sampled: dict[str, Any] = {"do_sample": True, "temperature": 5.0, "ignore_eos": True, **change}
        assert each.one(**sampled).ids == most_likely, change
    wild: dict[str, Any] = {"do_sample": True, "temperature": 5.0, "ignore_eos": True}
    assert each.one(**wild).ids != most_likely
    if "min_p" not in each.unsupported:
        assert each.one(**{**wild, "min_p": 1.0}).ids == most_likely


def test_temperature_alone_samples_in_every_version(each: Loaded) -> None:
    most_likely = each.one(ignore_eos=True).ids
    drawn = {tuple(each.one(do_sample=True, temperature=2.0, ignore_eos=True).ids) for _ in range(3)}
    assert drawn != {tuple(most_likely)}


def test_alternatives_come_the_first_one_first(each: Loaded) -> None:
    answer = each.one(top_logprobs=3, ignore_eos=True, max_new_tokens=4)
    tops = [top for output in answer.outputs for top in output.tops or ()]
    for id, logprob, top in zip(answer.ids, answer.logprobs, tops, strict=True):
        assert len(top) == 3
        assert top[0] == (id, logprob)
        assert [one[1] for one in top] == sorted((one[1] for one in top), reverse=True)


def test_a_biased_and_a_forbidden_token(each: Loaded) -> None:
    plain = each.one(ignore_eos=True).ids
    assert each.one(max_new_tokens=3, logit_bias=((50, 1000.0),)).ids == [50, 50, 50]
    without = each.one(ignore_eos=True, bad_token_ids=(plain[0],)).ids
    assert plain[0] not in without


def test_what_a_request_is_refused_for_stays_with_it(each: Loaded) -> None:
    alone = each.one().ids
    key = each.add()
    bad: dict[str, Any] = {"top_p": 2.0, "repetition_penalty": 0.0, "max_new_tokens": 0}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=name):
            each.add(**{"do_sample": True, name: value})
    with pytest.raises(ValueError, match="the prompt is empty"):
        each.add([])
    with pytest.raises(ValueError, match="token ids must be below"):
        each.add([5, 99999])
    assert joined(each.run(key)[key]).ids == alone


def test_a_prompt_that_does_not_fit_into_a_step_is_refused(each: Loaded) -> None:
    each.engine._max_prompt, before = 4, each.engine._max_prompt
    with pytest.raises(ValueError, match="TensorRT-LLM was started with a limit of 4 "):
        each.add([5] * 5)
    each.engine._max_prompt = before


def test_the_engines_own_refusals_end_one_request(each: Loaded) -> None:
    """Each kind, at the time at which each version has it."""
    alone = each.one().ids
    key = each.add()
    each.engine._max_prompt, before = 1 << 62, each.engine._max_prompt
    limit = each.engine._llm.args.max_num_tokens
    with pytest.raises((ValueError, RuntimeError), match="The sum of prompt length"):
        each.add([5] * (limit + 1))
    each.engine._max_prompt = before
    # The adapter's own check is passed by: its C++ refuses when the result is consumed.
    late = each.one([5] * tiny.CONTEXT)
    assert (late.finish, late.ids) == (Finish.ERROR, [])
    assert "leaves no room in max_seq_len" in (late.error or "")
    assert joined(each.run(key)[key]).ids == alone


def test_a_cancelled_request_is_aborted_and_says_nothing_more(each: Loaded) -> None:
    gone = each.add(max_new_tokens=400, ignore_eos=True)
    kept = each.add(max_new_tokens=30, ignore_eos=True)
    before = len(each.double.aborted)
    each.engine.step()
    each.engine.cancel(gone)
    each.engine.cancel(gone)  # unknown by now
    each.run(kept)
    assert gone not in each.heard_of
    assert each.double.num_active == 0
    assert len(each.double.aborted) == before + 1


def test_the_length_limit_is_the_engines(each: Loaded) -> None:
    assert each.engine.info.max_total_tokens == each.double.max_seq_len == tiny.CONTEXT


# -- log-probabilities and logits of prompts ---------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_prompts_log_probabilities_are_its_own_tokens_each_time(model: Path, version: str) -> None:
    with loaded(model, f"version={version}", enable_prefix_caching=None if version > "1.2" else False) as found:
        prompt = "Once upon a time there was a little town by the sea, and the people of the town told stories. " * 3
        ids = found.tokenizer.encode(prompt).ids
        assert len(ids) > 64  # two blocks of the KV cache
        wanted = reference(found.double.model, ids)
        for _ in range(2):
            output = found.one(prompt, prompt_logprobs=True).outputs[0]
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            assert output.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
            assert output.prompt_tops is None
            assert output.extras is None
        output = found.one(prompt, prompt_logprobs=True, prompt_top_logprobs=2).outputs[0]
        assert output.prompt_logprobs is not None
        assert output.prompt_tops is not None
        assert output.prompt_tops[0] == ()
        for logprob, id, top in zip(output.prompt_logprobs[1:], ids[1:], output.prompt_tops[1:], strict=True):
            assert logprob is not None
            assert len(top) == 2
            assert top[0][1] >= max(top[1][1], logprob)
            assert dict(top).get(id, logprob) == logprob


def test_a_prompt_from_the_cache_is_told_from_a_wrong_answer(model: Path) -> None:
    with loaded(model, "version=1.2.1") as found:
        ids = list(range(5, 105))
        found.one(ids)
        found.engine._salted = False
        answer = found.one(ids, prompt_logprobs=True)
        assert answer.finish is Finish.ERROR
        assert "option.enable_prefix_caching=false" in (answer.error or "")
    with loaded(model, "version=1.1.0") as found:
        assert "enable_prefix_caching=false" in found.unsupported["prompt_logprobs"]


def test_a_salt_divides_the_prefix_cache_with_trtllm(model: Path) -> None:
    with loaded(model, "version=1.2.1") as found:
        found.double.cached.clear()
        for salt in ("a", "b", "a", "", "b", "", ""):
            found.one(cache_salt=salt)
        caches = found.double.cached
        assert sorted(map(len, caches.values())) == [2, 2, 3]
        assert len(caches[None]) == 3
        found.one(cache_salt="a", prompt_logprobs=True)
        assert sorted(map(len, caches.values())) == [1, 2, 2, 3]  # it has a cache of its own
    with loaded(model, "version=1.1.0") as found:
        assert "TensorRT-LLM 1.2" in found.unsupported["cache_salt"]


# -- the adapter on the double: what only some versions, samplers and options have -------------------------------------


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
def test_beams_come_at_the_end_the_best_first_with_trtllm(model: Path, manners: str) -> None:
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
        with pytest.raises(ValueError, match="structured output cannot be combined"):
            newest.add(structured_output=StructuredOutput("choice", '["left"]'), **asked)
    assert newest.one(ignore_eos=True).ids == alone


def test_an_adapter_changes_the_tokens_until_it_is_dropped(model: Path, tmp_path: Path) -> None:
    good, large = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "large", r=64)
    with loaded(model, "version=1.3.0", engine_options={"enable_lora": True, "max_lora_rank": 16}) as found:
        adapter = Adapter("good", 1, str(good))
        found.engine.load_adapter(adapter)
        plain = found.one(ignore_eos=True).ids
        assert found.one(adapter=adapter, ignore_eos=True).ids != plain
        found.engine.drop_adapter(adapter)
        with pytest.raises(ValueError, match=r"rank is 64, but option\.max_lora_rank=16"):
            found.engine.load_adapter(Adapter("large", 2, str(large)))
        with pytest.raises(FileNotFoundError, match=r"gone/adapter_config\.json"):
            found.add(adapter=Adapter("gone", 4, str(tmp_path / "gone")))
        assert found.one(ignore_eos=True).ids == plain
    with loaded(model, "version=1.3.0") as found:
        assert "LoRA is not enabled" in (found.one(adapter=adapter).error or "")


def test_an_unloaded_adapter_is_checked_with_its_first_request(model: Path, tmp_path: Path) -> None:
    """One registered with preload=false, or any after a restart."""
    large = Adapter("large", 1, str(write_adapter(tmp_path / "large", r=64)))
    with loaded(model, "version=1.3.0", engine_options={"enable_lora": True, "max_lora_rank": 16}) as found:
        with pytest.raises(ValueError, match=r"rank is 64, but option\.max_lora_rank=16"):
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


# -- the adapter on the double: however items are cut and requests end, and where it starts ----------------------------


@pytest.mark.parametrize(
    "manners",
    ["burst=3", "burst=3;late_finish", "late_finish", "burst=7;pause=0", "version=1.3.0;burst=2", "late_abort=3"],
)
def test_no_token_is_lost_or_said_twice_however_items_are_cut(model: Path, manners: str) -> None:
    with loaded(model) as found:
        wanted = found.one(max_new_tokens=100)
        stops = found.one(max_new_tokens=100, stop_token_ids=(wanted.ids[5],))
    with loaded(model, manners) as found:
        keys = [found.add(max_new_tokens=100) for _ in range(3)]
        keys.append(found.add(max_new_tokens=100, stop_token_ids=(wanted.ids[5],)))
        answers = [joined(outputs) for outputs in found.run(*keys).values()]
        for answer in answers[:3]:
            assert (answer.ids, answer.logprobs, answer.finish) == (wanted.ids, wanted.logprobs, wanted.finish)
        assert (answers[3].ids, answers[3].finish) == (stops.ids, Finish.STOP)
        assert not any(sum(output.finish is not None for output in answer.outputs) != 1 for answer in answers)


def test_a_slow_reader_gets_all_that_lay_there_at_once(model: Path) -> None:
    import time

    with loaded(model, "pause=0") as found:
        wanted = found.one(max_new_tokens=60, ignore_eos=True)
        key = found.add(max_new_tokens=60, ignore_eos=True)
        time.sleep(0.3)
        answer = joined(found.run(key)[key])
        assert (answer.ids, answer.logprobs) == (wanted.ids, wanted.logprobs)
        assert len(answer.outputs) < 60


def test_a_late_abort_brings_nothing(model: Path) -> None:
    with loaded(model, "late_abort=20") as found:
        gone = found.add(max_new_tokens=400, ignore_eos=True)
        found.engine.step()
        found.engine.cancel(gone)
        kept = found.add(max_new_tokens=60, ignore_eos=True)
        found.run(kept)
        assert found.heard_of == set()
        assert found.double.num_active == 0


def test_a_request_that_the_engine_cancels_by_itself_is_an_error(model: Path) -> None:
    with loaded(model, "cancel_all=5") as found:
        answer = found.one(logprobs=False)
        assert (answer.finish, answer.error) == (
            Finish.ERROR,
            "the engine ended the request with the finish reason 'cancelled'",
        )
        answer = found.one()
        assert (answer.finish, (answer.error or "")[:16]) == (Finish.ERROR, "logprobs length:")


def test_an_abort_whose_last_item_cannot_be_read_concerns_nobody(model: Path) -> None:
    """1.2 compares the numbers of tokens and log-probabilities also where a request was cancelled."""
    with loaded(model, "version=1.2.1") as found:
        gone = [found.add(max_new_tokens=400, ignore_eos=True) for _ in range(3)]
        kept = found.add(max_new_tokens=60, ignore_eos=True)
        found.engine.step()
        for key in gone:
            found.engine.cancel(key)
        answer = joined(found.run(kept)[kept])
        assert (answer.finish, answer.error) == (Finish.LENGTH, None)
        assert len(found.double.aborted) == 3, "each was aborted once"
        assert found.double.num_active == 0
        assert found.heard_of <= set(gone)
        left = found.add(max_new_tokens=400, ignore_eos=True)
        found.engine.step()
        assert left in found.engine._requests.running
    assert not found.engine._requests._tasks


def test_a_failure_in_reading_ends_its_request_and_aborts_it(model: Path) -> None:
    with loaded(model, "assert_logprobs=4") as found:
        answer = found.one(max_new_tokens=400, ignore_eos=True)
        assert answer.finish is Finish.ERROR
        assert "logprobs length" in (answer.error or "")
        assert len(answer.ids) <= 3
        found.one(max_new_tokens=3, ignore_eos=True)
        assert found.double.num_active == 0


# -- where it starts ---------------------------------------------------------------------------------------------


def test_mpi_is_left_but_for_what_is_said_of_networks() -> None:
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMIX_RANK": "0",
        "PMI_SIZE": "4",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "HOME": "x",
    }
    leave_mpi(environ)
    assert environ == {"OMPI_MCA_btl_tcp_if_include": "lo", "HOME": "x"}
    launched = {"OMPI_COMM_WORLD_SIZE": "4", "TLLM_SPAWN_PROXY_PROCESS": "1"}
    leave_mpi(launched)
    assert len(launched) == 2
    alone = {"PMIX_MCA_gds": "hash", "OMPI_MCA_pml": "ob1"}
    leave_mpi(alone)
    assert len(alone) == 2


def test_it_starts_under_mpirun(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with loaded(model) as found:
        assert found.one().finish


@pytest.mark.parametrize(
    ("manners", "options", "message"),
    [
        ("init_fails", {}, "Executor worker died during initialization"),
        ("", {"tensor_parallel_degree": "2"}, "Only 1 GPUs are available, but 2 are required."),
        ("", {"engine_options": {"engine_args": {"no_such_thing": 1}}}, "LLM got invalid argument: no_such_thing"),
        ("", {"engine_options": {"engine_args": {"kv_cache_config": {"nope": 1}}}}, "nope"),
        ("", {"engine_options": {"engine_args": {"batching_type": "x"}}}, "batching_type"),
        ("die_after=1", {}, "the executor died"),
        ("stall_after=1", {"engine_options": {"inactivity_timeout": 0.3}}, "no request made progress for 0.3 s"),
    ],
)
def test_what_keeps_it_from_starting_is_said(model: Path, manners: str, options: dict[str, Any], message: str) -> None:
    with using.tensorrt_llm(manners), pytest.raises((ValueError, RuntimeError, TimeoutError), match=message):
        trtllm.load(EngineConfig(Config(**options), model))


def test_several_gpus(model: Path) -> None:
    with loaded(model, "gpus=4", tensor_parallel_degree="2", engine_options={"pipeline_parallel_size": 2}) as found:
        assert found.engine.info.device == "4 GPU"
