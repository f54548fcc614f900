"""The adapter on the double, in every version that it is written for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import Finish
from tests.doubles import tiny
from tests.doubles.reference import reference
from tests.gpu.trtllm.cases import PROMPT, Loaded, joined, loaded

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
    bad: dict[str, Any] = {"top_p": 2.0, "repetition_penalty": 0.0, "max_new_tokens": 0, "num_beams": 9}
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
    with pytest.raises(ValueError, match="more than the 4 that TensorRT-LLM was started for"):
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
def test_a_prompts_log_probabilities_are_its_own_tokens_also_the_second_time(model: Path, version: str) -> None:
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
