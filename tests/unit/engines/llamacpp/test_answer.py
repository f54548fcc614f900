"""The events of llama-server: plain tokens, which are read by a shorter way, and all others."""

from __future__ import annotations

import json
import random
from typing import Any, cast

import pytest

from handler.core.values import Finish, Sampling, StructuredOutput
from handler.engines.base import EngineRequest
from handler.engines.llamacpp.answer import LlamaCall, Tokens, check_free, read_completion
from handler.engines.llamacpp.pieces import Pieces, is_incomplete
from handler.engines.remote.servers import Failed, Lasting, Part
from tests.one_test import in_one_test

EOS = 2
SAMPLING = Sampling(max_new_tokens=3, logprobs=False)
PLAIN: dict[str, Any] = {"index": 0, "content": "a", "tokens": [7], "stop": False, "id_slot": 0, "tokens_predicted": 1}


def call(sampling: Sampling = SAMPLING) -> LlamaCall:
    found = LlamaCall(EngineRequest(1, [5, 6], sampling), {EOS}, 100)
    found.begin()
    return found


def state(found: LlamaCall) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if name != "_sampling"}


def event(**fields: Any) -> bytes:
    return json.dumps({**PLAIN, **fields}).encode()


def test_a_plain_token_has_the_same_effect_as_by_the_longer_way() -> None:
    short, long = call(), call()
    for number, id in enumerate((7, 8, 9), 1):
        data = event(tokens=[id], tokens_predicted=number)
        assert short.take_plain(data) == id
        part = Part()
        assert long.take_tokens(read_completion(data), part, None)
        assert part == Part([id], [None])
        assert state(short) == state(long)
    assert short.take_plain(event(tokens=[10], tokens_predicted=4)) is None, "more tokens than the request allows"


def test_an_end_token_that_must_not_end_the_response_yet_goes_the_longer_way() -> None:
    assert call(SAMPLING._replace(ignore_eos=True)).take_plain(event(tokens=[EOS])) == EOS
    assert call().take_plain(event(tokens=[EOS])) is None


@pytest.mark.parametrize(
    "data",
    [
        *(event(tokens=ids) for ids in ([], [7, 8], [True], [7.0], ["7"], [-1], [1 << 31], None, 7, "7", {"7": 7})),
        *(event(stop=stop) for stop in (True, None, 0, "")),
        *(event(tokens_predicted=number) for number in (0, 2, None, "1")),
        event(error={"code": 500}),
        event(prompt_progress={"total": 9}),
        b"[]",
        b"7",
        b"",
        b'{"tokens": [7',
        b'{"tokens": [7], "stop": false}',
        b'{"tokens": [7], "tokens_predicted": 1}',
    ],
)
def test_any_other_event_goes_the_longer_way(data: bytes) -> None:
    found = call()
    before = state(found)
    assert found.take_plain(data) is None
    assert state(found) == before


def test_tokens_with_log_probabilities_go_the_longer_way() -> None:
    for scored in (SAMPLING._replace(logprobs=True), SAMPLING._replace(top_logprobs=2)):
        assert call(scored).take_plain(event()) is None


# -- the longer way ----------------------------------------------------------------------------------------------------

BYTES = [bytes([byte]) for byte in range(256)]
PLAIN_CALL = Sampling(max_new_tokens=100, logprobs=False)


def sent(data: bytes, start: int, end: int, stop_type: str = "") -> Tokens:
    """The event of llama-server for the bytes up to `end`, whose tokens are bytes: it has the id of the last one."""
    ids = [] if end == start else [data[end - 1]]
    return Tokens(ids, (), data[start:end].decode(errors="replace"), end, stop_type)


def test_all_ids_arrive_although_the_server_sends_only_the_last_of_a_character() -> None:
    draw = random.Random(41)
    for _ in range(50):
        data = "".join(draw.choices("aé€😀", k=6)).encode()
        found, part, start = call(PLAIN_CALL), Part(), 0
        for end in range(1, len(data) + 1):
            if not is_incomplete(data[:end]):
                event = sent(data, start, end)
                assert found.num_missing(event) == end - start - 1
                assert found.take_tokens(event, part, Pieces(BYTES))
                start = end
        assert bytes(part.ids) == data
        assert found.prefix([1]) == [5, 6, *data, 1]


def test_ids_that_are_uncertain_are_computed_again_without_a_stream() -> None:
    """As many as are missing, after those that have arrived; the rest goes on as a stream."""
    for pieces in (None, Pieces([*BYTES, b"\xc3"])):
        found, part = call(PLAIN_CALL), Part()
        assert found.take_tokens(sent(b"ab", 0, 1), part, pieces)
        assert not found.take_tokens(Tokens([0xA9], (), "é", 3), part, pieces)
        body = found.next_body()
        assert (body["n_predict"], body["stream"], body["prompt"]) == (2, False, [5, 6, ord("a")])
        found.begin()
        assert found.take_tokens(Tokens([0xC3, 0xA9], (), "é", 2, "limit"), part, pieces)
        assert (part.ids, found.finish_reason) == ([*"aé".encode()], None)
        body = found.next_body()
        assert (body["n_predict"], body["stream"], body["prompt"]) == (97, True, [5, 6, *"aé".encode()])


def test_with_structured_output_one_of_the_possible_divisions_is_taken() -> None:
    """A rule applies from the beginning of a completion, so none can follow."""
    found, part = call(PLAIN_CALL._replace(structured_output=StructuredOutput("json_object", ""))), Part()
    assert found.resumes
    assert found.take_tokens(Tokens([0xA9], (), "é", 2), part, Pieces([*BYTES, b"\xc3"]))
    assert part.ids in ([0xC3, 0xA9], [256, 0xA9])
    assert not found.resumes


@in_one_test(
    ("event", "reason"),
    [
        (Tokens([7], (), "", 1), None),
        (Tokens([7], (), "", 1, "eos"), Finish.EOS),
        (Tokens([EOS], (), "", 1, "eos"), Finish.EOS),
        (Tokens([EOS], (), "", 1), Finish.EOS),
        (Tokens([9], (), "", 1), Finish.STOP),
        (Tokens([9], (), "", 1, "limit"), Finish.STOP),
        (Tokens([7], (), "", 1, "word"), Finish.EOS),
        (Tokens([], (), "", 0, "eos"), Finish.EOS),
        (Tokens([7, 8, 7], (), "", 3, "limit"), Finish.LENGTH),
        (Tokens([7], (), "", 1, "limit"), None),
        (Tokens([7], (), "", 1, "limit", truncated=True), Finish.LENGTH),
        (Tokens([7], (), "", 1, truncated=True), None),
        (Tokens([7], (), "", 2, "limit"), None),
    ],
)
def test_the_reason_of_an_end(event: Tokens, reason: Finish | None) -> None:
    found, part = call(SAMPLING._replace(stop_token_ids=(9,))), Part()
    assert found.take_tokens(event, part, None)
    assert (found.finish_reason, part.finish) == (reason, reason)


def test_tokens_after_an_end_are_not_part_of_the_response() -> None:
    found, part = call(PLAIN_CALL), Part()
    found.take_tokens(Tokens([7, EOS, 8], (), "", 3), part, None)
    assert (part.ids, part.finish) == ([7, EOS], Finish.EOS)


def test_a_response_has_its_least_tokens_before_an_end_ends_it() -> None:
    found, part = call(SAMPLING._replace(max_new_tokens=5, min_new_tokens=2)), Part()
    body = found.next_body()
    assert (body["n_predict"], body["ignore_eos"]) == (2, True)
    assert [EOS, False] in body["logit_bias"]
    found.take_tokens(Tokens([7, 8], (), "", 2, "limit"), part, None)
    assert found.finish_reason is None
    body = found.next_body()
    assert (body["n_predict"], body["ignore_eos"], body["prompt"]) == (3, False, [5, 6, 7, 8])
    assert [EOS, False] not in body["logit_bias"]
    more = call(SAMPLING._replace(max_new_tokens=3, min_new_tokens=9)).next_body()
    assert more["n_predict"] == 3, "no more than the response may have"
    with pytest.raises(ValueError, match="min_new_tokens cannot be combined with structured output"):
        call(SAMPLING._replace(min_new_tokens=1, structured_output=StructuredOutput("json_object", "")))


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Tokens([7], (), "", 1, "unheard-of"), Failed),
        (Tokens([7, 8, 9, 10], (), "", 4), Failed),
        (Tokens([-1], (), "", 1), ValueError),
        (Tokens([1 << 31], (), "", 1), ValueError),
        (Tokens(cast(list[int], [True]), (), "", 1), ValueError),
        (Tokens(cast(list[int], [7.0]), (), "", 1), ValueError),
    ],
)
def test_an_event_that_does_not_match_the_request_is_an_error(event: Tokens, error: type[Exception]) -> None:
    with pytest.raises(error):
        call().take_tokens(event, Part(), None)
    largest = Part()
    call().take_tokens(Tokens([(1 << 31) - 1, 0], (), "", 2), largest, None)
    assert largest.ids == [(1 << 31) - 1, 0]


def test_each_completion_draws_other_random_numbers() -> None:
    found = call(PLAIN_CALL._replace(do_sample=True, seed=40))
    assert found.next_body()["seed"] == 40
    for number in range(1, 4):
        found.take_tokens(Tokens([7], (), "", 1, "limit"), Part(), None)
        assert found.next_body()["seed"] == 40 + number
        found.begin()


def test_cached_tokens_are_counted_once_and_no_more_than_the_prompt_has() -> None:
    for cached, expected in ((0, None), (1, 1), (2, 2), (9, 2)):
        found, part = call(), Part()
        found.take_tokens(Tokens([7], (), "", 1, "limit", num_cached=cached), part, None)
        assert (part.extras and part.extras.num_cached_tokens) == expected
        found.next_body()
        found.begin()
        later = Part()
        found.take_tokens(Tokens([7], (), "", 1, "limit", num_cached=1), later, None)
        assert later.extras is None, "a further completion finds the prompt in the cache by itself"
    longer = Part()
    call().take_tokens(Tokens([7], (), "", 1, "eos", num_cached=9, num_prompt=5), longer, None)
    assert longer.extras is not None
    assert longer.extras.num_cached_tokens == 5, "with images, the server's prompt is longer"


def test_a_completion_without_a_token_is_a_failure_but_for_a_character_that_is_computed_again() -> None:
    with pytest.raises(Failed, match="ended its response without a token"):
        call().check_progress()
    found = call()
    found.take_tokens(Tokens([], (), "", 1, "limit"), Part(), None)
    found.check_progress()
    found.next_body()
    found.begin()
    with pytest.raises(Failed, match="ended its response without a token"):
        found.check_progress()
    begun = call()
    begun.take_tokens(Tokens([7], (), "", 1), Part(), None)
    begun.check_progress()


def test_a_server_with_a_grammar_of_its_own_is_refused() -> None:
    for free in (b"{}", b'{"generation_settings/grammar": ""}', b"[]", b"?", b"null"):
        check_free(free)
    with pytest.raises(Lasting, match="constrains all responses"):
        check_free(b'{"generation_settings/grammar": "root ::= [a]"}')


def test_each_field_of_an_event_is_read() -> None:
    last = {
        **{"tokens": [7], "completion_probabilities": [{"id": 7}], "content": "a", "tokens_predicted": 3},
        **{"stop": True, "stop_type": "limit", "truncated": True, "timings": {"cache_n": 4}, "tokens_evaluated": 5},
    }
    assert read(last) == Tokens([7], [{"id": 7}], "a", 3, "limit", True, 4, 5, False)
    assert read({**last, "stop": False}) == Tokens([7], [{"id": 7}], "a", 3, "", True, 0, 5, False)
    assert read({"tokens_predicted": 0}) == Tokens([], [], "", 0)
    progress = read({"tokens": [-1], "tokens_predicted": 0, "prompt_progress": {"total": 9}})
    assert (progress.ids, progress.is_progress) == ([], True)
    for timings in ({"cache_n": -1}, {"cache_n": "4"}, None):
        assert read({**last, "timings": timings}).num_cached == 0
    for count in (-5, 0, "5", None):
        assert read({**last, "tokens_evaluated": count}).num_prompt == 0


@in_one_test(
    "value",
    [
        *({"tokens_predicted": number} for number in (-1, "1", None, True)),
        *({"tokens_predicted": 1, name: 7} for name in ("tokens", "completion_probabilities", "content", "timings")),
        {"tokens": [7]},
        {"tokens_predicted": 1, "stop": True},
        [],
        7,
    ],
)
def test_an_event_that_cannot_be_read_is_a_failure(value: Any) -> None:
    with pytest.raises(Failed, match="sent an event that cannot be read"):
        read(value)


def read(value: Any) -> Tokens:
    return read_completion(json.dumps(value).encode())
