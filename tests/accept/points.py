"""The points, each a function that raises AssertionError where the engine does something else than it must."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from handler.core.media import Medium
from handler.core.values import Adapter, Finish, StructuredOutput
from tests.accept.served import Served, Skip, kill

Point = Callable[[Served], None]

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "ignore_eos": True}
SENTENCE = "La la la la la la la la"


def greedy_is_the_same_twice(served: Served) -> None:
    first = served.one(ignore_eos=True)
    assert len(first.ids) == 16, first.ids
    assert served.one(ignore_eos=True).ids == first.ids


def every_token_has_its_log_probability(served: Served) -> None:
    _need_log_probabilities(served)
    asked: dict[str, Any]
    for asked in ({}, SAMPLED):
        answer = served.one(max_new_tokens=64, **asked)
        missing = [at for at, logprob in enumerate(answer.logprobs) if logprob is None]
        assert not missing, f"none at {missing}"
        assert all(logprob <= 0 for logprob in answer.logprobs if logprob is not None)


def alternatives_come_the_most_likely_first(served: Served) -> None:
    served.needs("top_logprobs")
    answer = served.one(top_logprobs=4, ignore_eos=True)
    for delta in answer.deltas:
        for token in delta.tokens:
            found = [one.logprob or 0.0 for one in token.top]
            assert len(found) == 4, found
            assert found == sorted(found, reverse=True)
            assert token.top[0].id == token.id, "the greedy choice is not the most likely"


def narrow_sampling_is_greedy(served: Served) -> None:
    greedy = served.one(ignore_eos=True).ids
    for change in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"temperature": 0.0}, {"min_p": 1.0}):
        if "min_p" in change and "min_p" in served.unsupported:
            continue
        assert served.one(**{**SAMPLED, **change}).ids == greedy, change


def sampling_samples(served: Served) -> None:
    drawn = {tuple(served.one(**SAMPLED).ids) for _ in range(4)}
    assert len(drawn) > 1, "four sampled answers are the same"


def a_seed_repeats_an_answer_alone_and_in_company(served: Served) -> None:
    served.needs("seed")
    alone = served.one(**SAMPLED, seed=7).ids
    assert served.one(**SAMPLED, seed=7).ids == alone
    assert served.one(**SAMPLED, seed=8).ids != alone
    id = served.submit(**SAMPLED, seed=7)
    for seed in range(20, 25):
        served.submit(**SAMPLED, seed=seed)
    assert served.run()[id].ids == alone, "in company it is another"


def penalties_act(served: Served) -> None:
    served.needs("repetition_penalty", "presence_penalty", "frequency_penalty")
    plain = served.one(SENTENCE, ignore_eos=True, max_new_tokens=64).ids
    for change in ({"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert served.one(SENTENCE, ignore_eos=True, max_new_tokens=64, **change).ids != plain, change


def no_n_gram_repeats(served: Served) -> None:
    served.needs("no_repeat_ngram_size")
    ids = served.one(SENTENCE, ignore_eos=True, max_new_tokens=64, no_repeat_ngram_size=2).ids
    pairs = list(itertools.pairwise(ids))
    assert len(set(pairs)) == len(pairs)


def forbidden_words_do_not_come(served: Served) -> None:
    served.needs("bad_sequences")
    whole = served.one(max_new_tokens=48).text
    words = re.findall(r" \w+", whole)
    if not words:
        raise Skip(f"no word to forbid in {whole!r}")
    found = served.one(max_new_tokens=48, bad_sequences=(words[0],)).ids
    forbidden = served.tokenizer.encode(words[0]).ids
    assert not any(found[at : at + len(forbidden)] == list(forbidden) for at in range(len(found)))


def forbidden_and_biased_tokens(served: Served) -> None:
    plain = served.one(ignore_eos=True).ids
    assert plain[0] not in served.one(ignore_eos=True, bad_token_ids=(plain[0],)).ids
    wanted = plain[-1]
    assert served.one(ignore_eos=True, max_new_tokens=3, logit_bias=((wanted, 1000.0),)).ids == [wanted] * 3


def a_stop_id_ends_an_answer_and_is_its_last_token(served: Served) -> None:
    whole = served.one(ignore_eos=True).ids
    for ignore_eos in (False, True):
        answer = served.one(stop_token_ids=(whole[3],), ignore_eos=ignore_eos)
        assert answer.ids == whole[: whole.index(whole[3]) + 1], answer.ids
        assert answer.finish is Finish.STOP, answer.finish


def a_stop_string_is_cut_out(served: Served) -> None:
    whole = served.one(ignore_eos=True, max_new_tokens=24).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    answer = served.one(ignore_eos=True, max_new_tokens=24, stop=(stop,))
    assert (answer.text, answer.finish) == (whole[: whole.index(stop)], Finish.STOP)


def an_end_ends_an_answer(served: Served) -> None:
    eos = _end(served)
    forced = served.one(max_new_tokens=8, logit_bias=((eos, 1000.0),))
    assert (forced.ids, forced.finish) == ([eos], Finish.EOS), (forced.ids, forced.finish)


def a_least_length_holds_the_end_back(served: Served) -> None:
    # Of a bias of minus infinity by min_tokens and this one the former wins.
    held = served.one(max_new_tokens=12, min_new_tokens=6, logit_bias=((_end(served), 50.0),))
    assert len(held.ids) == 7, held.ids
    assert held.finish is Finish.EOS


def ignore_eos_goes_on(served: Served) -> None:
    on = served.one(max_new_tokens=8, ignore_eos=True, logit_bias=((_end(served), 1000.0),))
    assert (len(on.ids), on.finish) == (8, Finish.LENGTH)


def a_prompts_log_probabilities_are_all_there_also_the_second_time(served: Served) -> None:
    served.needs("prompt_logprobs")
    prompt = "The capital of France is Paris, and the capital of Italy is Rome. " * 6
    ids = served.tokenizer.encode(prompt).ids
    found = [served.one(prompt, prompt_logprobs=True, prompt_top_logprobs=2, max_new_tokens=2) for _ in range(2)]
    prefills = [answer.deltas[0].prefill or () for answer in found]
    assert [len(prefill) for prefill in prefills] == [len(ids)] * 2, found[-1].error
    first, second = ([token.logprob or 0.0 for token in prefill[1:]] for prefill in prefills)
    assert all(logprob < 0 for logprob in first)
    for token in prefills[0][1:]:
        likeliest, next_one = (one.logprob or 0.0 for one in token.top)
        assert likeliest >= next_one, token
        assert likeliest >= (token.logprob or 0.0), token
    furthest = max(abs(one - other) for one, other in zip(first, second, strict=True))
    assert furthest < 0.5, f"the second time they differ by {furthest}"


def logits_have_their_shapes(served: Served) -> None:
    served.needs("return_context_logits", "return_generation_logits")
    answer = served.one(return_context_logits=True, return_generation_logits=True, max_new_tokens=3, ignore_eos=True)
    logits = answer.deltas[0].extras
    assert logits is not None, answer.error
    assert logits.context_logits is not None
    assert logits.generation_logits is not None
    assert len(logits.context_logits) == len(served.tokenizer.encode("Once upon a time").ids)
    assert len(logits.generation_logits) == 3
    assert (
        int(max(range(len(logits.generation_logits[0])), key=logits.generation_logits[0].__getitem__)) == answer.ids[0]
    )


def a_cancelled_request_frees_its_place(served: Served) -> None:
    gone = served.submit(max_new_tokens=1000, ignore_eos=True)
    kept = served.submit(ignore_eos=True)
    served.batcher.step(timeout=1)
    served.batcher.cancel(gone)
    assert set(served.run()) <= {kept}
    assert served.batcher.num_active == 0


def what_one_request_is_refused_for_stays_with_it(served: Served) -> None:
    alone = served.one(ignore_eos=True).ids
    good = served.submit(ignore_eos=True)
    bad = served.submit(repetition_penalty=-1.0)
    found = served.run()
    assert found[bad].error
    assert found[good].ids == alone
    assert served.engine.restarts == 0


def beams_come_the_best_first(served: Served) -> None:
    served.needs("num_beams")
    id = served.submit(num_beams=3, max_new_tokens=8, ignore_eos=True)
    deltas = served.run()[id].deltas
    assert [delta.sequence for delta in deltas] == [0, 1, 2], deltas[-1].error
    totals = [sum(token.logprob or 0.0 for token in delta.tokens) for delta in deltas]
    assert totals == sorted(totals, reverse=True), totals
    assert len({tuple(token.id for token in delta.tokens) for delta in deltas}) == 3


def a_schema_holds(served: Served) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    found = _guided(served, StructuredOutput("json_schema", json.dumps(schema)))
    assert isinstance(json.loads(found)["name"], str)


def an_expression_holds(served: Served) -> None:
    assert re.fullmatch(r"[0-9]{3}-(a|b)", _guided(served, StructuredOutput("regex", r"[0-9]{3}-(a|b)")))


def a_choice_holds(served: Served) -> None:
    choices = ["yes.", "no (or not)"]
    assert _guided(served, StructuredOutput("choice", json.dumps(choices))) in choices


def a_grammar_holds(served: Served) -> None:
    assert _guided(served, StructuredOutput("grammar", 'root ::= "left" | "right"')) in ("left", "right")


def a_bad_guide_ends_its_request_alone(served: Served) -> None:
    served.needs("structured_output")
    alone = served.one(ignore_eos=True).ids
    broken, good = served.submit(structured_output=StructuredOutput("regex", "(")), served.submit(ignore_eos=True)
    found = served.run()
    assert found[broken].error
    assert found[good].ids == alone
    assert served.engine.restarts == 0


def an_adapter_changes_the_answer(path: str) -> Point:
    def point(served: Served) -> None:
        plain = served.one(ignore_eos=True).ids
        adapter = Adapter("adapter", 1, path)
        served.engine.change_adapter(1_000_000, adapter, drop=False)
        served.engine.step(timeout=30)
        id = served.submit(adapter=adapter, ignore_eos=True)
        found = served.run()[id]
        assert not found.error, found.error
        assert found.ids != plain
        assert served.one(ignore_eos=True).ids == plain

    point.__name__ = "an_adapter_changes_the_answer"
    return point


def a_dead_worker_is_noticed_and_replaced(served: Served) -> None:
    workers = served.workers()
    if not workers:
        raise Skip("the engine has no processes of its own here")
    id = served.submit(max_new_tokens=1000, ignore_eos=True)
    served.batcher.step(timeout=5)
    print("     a worker is killed now: tracebacks of its death are expected", flush=True)
    kill(workers[-1])
    began = time.monotonic()
    found = served.run(seconds=300)[id]
    assert "engine failure" in found.error, found.error
    print(f"     noticed after {time.monotonic() - began:.1f} s: {found.error}")
    assert served.one(ignore_eos=True).finish is Finish.LENGTH


def _need_log_probabilities(served: Served) -> None:
    served.needs("top_logprobs")


def _guided(served: Served, structured_output: StructuredOutput) -> str:
    served.needs("structured_output")
    answer = served.one("Answer: ", structured_output=structured_output, max_new_tokens=64)
    assert not answer.error, answer.error
    return answer.text


def _end(served: Served) -> int:
    from handler.engines.huggingface import files

    assert served.config.model is not None
    own, ids = files.tokenizer_eos_id(served.config.model), files.eos_ids(served.config)
    if not ids:
        raise Skip("the model names no end")
    return min(ids) if own is None else own  # the one that `min_tokens` holds back


def images_are_seen_in_their_order_alone_and_in_company(served: Served) -> None:
    """Each compares the ids that TensorRT-LLM computes with those that were counted."""
    question, (red, blue) = "What are the colours, in order?", _pictures((280, 140, "ff0000"), (140, 280, "0000ff"))
    asked = [(red,), (blue,), (red, blue), (blue, red), ()]
    alone = []
    for images in asked:
        id = served.look(question, *images, ignore_eos=True)
        alone.append(served.run()[id].ids)
    assert alone[0] != alone[1], "red is blue"
    assert alone[2] != alone[3], "the order has no effect"
    ids = [served.look(question, *images, ignore_eos=True) for images in asked]
    text = served.submit(ignore_eos=True)
    found = served.run()
    assert [found[id].ids for id in ids] == alone, "in company they are others"
    assert len(found[text].ids) == 16, found[text].error


def images_of_the_same_bytes_stay_apart_in_the_prefix_cache(served: Served) -> None:
    """They differ in their sides alone."""
    _need_log_probabilities(served)
    first = []
    for image in _pictures((280, 140, "204060"), (140, 280, "204060")) * 2:
        id = served.look("What is it?", image, ignore_eos=True)
        first.append(served.run()[id].logprobs)
    assert first[0] != first[1], "one was taken for the other"
    assert abs((first[0][0] or 0.0) - (first[2][0] or 0.0)) < 0.3, "the same image is another one later"


def _pictures(*given: tuple[int, int, str]) -> list[Medium]:
    return [
        Medium("image", (width, height), pixels, sha256(f"{width}x{height}".encode() + pixels).hexdigest())
        for width, height, colour in given
        for pixels in [bytes.fromhex(colour) * (width * height)]
    ]


IMAGES: tuple[Point, ...] = (
    images_are_seen_in_their_order_alone_and_in_company,
    images_of_the_same_bytes_stay_apart_in_the_prefix_cache,
)

GENERAL: tuple[Point, ...] = (
    greedy_is_the_same_twice,
    every_token_has_its_log_probability,
    alternatives_come_the_most_likely_first,
    narrow_sampling_is_greedy,
    sampling_samples,
    a_seed_repeats_an_answer_alone_and_in_company,
    penalties_act,
    no_n_gram_repeats,
    forbidden_words_do_not_come,
    forbidden_and_biased_tokens,
    a_stop_id_ends_an_answer_and_is_its_last_token,
    a_stop_string_is_cut_out,
    an_end_ends_an_answer,
    a_least_length_holds_the_end_back,
    ignore_eos_goes_on,
    a_prompts_log_probabilities_are_all_there_also_the_second_time,
    a_cancelled_request_frees_its_place,
    what_one_request_is_refused_for_stays_with_it,
)
GUIDES: tuple[Point, ...] = (
    a_schema_holds,
    an_expression_holds,
    a_choice_holds,
    a_grammar_holds,
    a_bad_guide_ends_its_request_alone,
)
