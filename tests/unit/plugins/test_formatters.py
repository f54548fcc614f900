"""A user's formatters: what they get, on which thread, and what becomes of what they return."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from handler.core.errors import FormatterFailed, GenerationFailed, InvalidParameter, InvalidPayload
from handler.core.values import Delta, Finish, Token
from handler.formatters import RequestInput, Sequence, TextGenerationOutput, TextInput
from handler.plugins.custom_messages import CustomReader, with_formatter
from handler.plugins.formatter_thread import FormatterThread
from handler.plugins.functions import InputFormatter, OutputFormatter, Style
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.registry import INVOCATIONS
from tests.one_test import in_one_test
from tests.servers import wait_for
from tests.unit.protocols.answers import CONTEXT, deltas, with_tops

# -- what a user's formatters get, how often they are called, and what becomes of what they return ---------------------


Function = Callable[..., Any]


def call(function: Function, body: dict[str, Any], style: Style = Style.OUTPUT, schema: str = "lmi") -> ParsedRequest:
    body = {"inputs": "hi", **body}
    plain = INVOCATIONS[schema].parse(body, CONTEXT)
    return with_formatter(plain, OutputFormatter("f", function, style), body, None, tgi_compat=schema == "tgi_compat")


def pieces(found: ParsedRequest, script: list[Delta] | None = None) -> list[str]:
    found.reply.start(0, 2)
    sent = [found.reply.feed(0, delta).decode() for delta in (deltas() if script is None else script)]
    assert found.reply.finished
    return sent


def text(token: str, finish: Finish | None = None) -> Delta:
    return Delta(1, 0, (Token(7, token, -1.0, False),), finish)


def take(output: TextGenerationOutput) -> str:
    token, *rest = output.sequences[output.best_sequence_index].get_next_token()
    return f"[{token.text if token else None} {' '.join(map(str, rest))}]"


STREAM = {"stream": True}

# -- how often ---------------------------------------------------------------------------------------------------


def test_a_stream_gets_a_call_a_token_as_it_comes() -> None:
    found = call(take, STREAM)
    assert (found.streams, found.reply.content_type) == (True, "application/jsonlines")
    assert found.formats.title == "output formatter 'f' of model.py"
    assert pieces(found, [text("a"), text("b"), text("c", Finish.EOS)]) == [
        "[a 0 True False]", "[b 1 False False]", "[c 2 False True]",
    ]  # fmt: skip


def test_several_tokens_at_once_are_several_calls() -> None:
    three = Delta(1, 0, tuple(Token(id, str(id), None, False) for id in range(3)), Finish.LENGTH)
    for body in (STREAM, {}):
        assert pieces(call(take, body), [three]) == ["[0 0 True False][1 1 False False][2 2 False True]"]


def test_a_whole_answer_comes_at_the_end() -> None:
    found = call(take, {})
    assert (found.streams, found.reply.content_type) == (False, "application/json")
    assert pieces(found, [text("a"), text("b", Finish.EOS)]) == ["", "[a 0 True False][b 1 False True]"]


@pytest.mark.parametrize("body", [STREAM, {}])
def test_one_that_takes_no_token_is_called_once_for_each(body: dict[str, Any]) -> None:
    def last(output: TextGenerationOutput) -> str:
        return output.sequences[0].tokens[-1].text

    assert "".join(pieces(call(last, body), [text("a"), text("b"), text("c", Finish.EOS)])) == "abc"


def test_one_that_takes_every_other_time_gets_all() -> None:
    calls = []

    def lazy(output: TextGenerationOutput) -> str:
        calls.append(1)
        return take(output) if len(calls) % 2 == 0 else ""

    sent = "".join(pieces(call(lazy, STREAM), [text("a"), text("b"), text("c"), text("d", Finish.EOS)]))
    assert sent.startswith("[a 0 True False][b 1")


def test_one_that_waits_for_the_end_writes_once() -> None:
    def whole(output: TextGenerationOutput) -> str:
        sequence = output.sequences[output.best_sequence_index]
        sequence.get_next_token()
        if not output.finished:
            return ""
        last = sequence.get_last_token()
        assert last is not None
        return f"{[token.text for token in sequence.tokens]} {sequence.finish_reason} {last.id}"

    assert pieces(call(whole, {}), [text("a"), text("b", Finish.STOP)]) == ["", "['a', 'b'] stop_sequence 7"]
    assert pieces(call(whole, STREAM), [text("a"), text("b", Finish.STOP)])[-1] == "['a', 'b'] stop_sequence 7"


def test_an_end_without_a_token_is_still_seen() -> None:
    assert pieces(call(take, STREAM), [text("a"), Delta(1, 0, (), Finish.EOS)])[1] == "[ 1 False True]"


def test_several_sequences_are_ranked_when_finished() -> None:
    def best(output: TextGenerationOutput) -> str:
        if not output.finished:
            return ""
        logprobs = {index: one.cumulative_log_prob for index, one in output.sequences.items()}
        return json.dumps([output.best_sequence_index, output.other_sequences_indices, logprobs])

    found = call(best, {"parameters": {"n": 2, "best_of": 3, "do_sample": True}})
    script = [delta for index in range(3) for delta in deltas(index, shift=[-2.0, 0.0, -1.0][index])]
    sent = pieces(found, script)
    assert [piece for piece in sent if piece] == sent[-1:]
    best_index, others, logprobs = json.loads(sent[-1])
    assert (best_index, others) == (1, [2])
    assert logprobs["1"] > logprobs["2"] > logprobs["0"]


# -- what they see -----------------------------------------------------------------------------------------------


def test_it_sees_the_alternatives_that_were_asked_for() -> None:
    def write(output: TextGenerationOutput) -> str:
        take(output)
        sequence = output.sequences[0]
        tops = sequence.get_next_top_tokens() if sequence.has_next_top_tokens() else None
        return "-" if tops is None else "|".join(token.text for token in tops) + "\n"

    asked = pieces(call(write, {**STREAM, "parameters": {"logprobs": 2}}), with_tops()[-2:])
    assert asked == [" fi| 😀\n\n", " fi|<s>\n"]
    assert pieces(call(write, STREAM), deltas()[-2:]) == ["-", "-"]
    sequence = Sequence()
    assert (sequence.has_next_top_tokens(), sequence.get_next_top_tokens()) == (False, None)


def test_it_sees_an_end_token_of_the_clients_as_the_models() -> None:
    def write(output: TextGenerationOutput) -> str:
        take(output)
        return str(output.sequences[0].finish_reason)

    for end, wanted in ((7, "eos_token"), (8, "stop_sequence")):
        found = call(write, {**STREAM, "parameters": {"end_id": end}})
        assert pieces(found, [text("a", Finish.STOP)]) == [wanted]


def test_it_sees_the_request() -> None:
    seen: list[TextGenerationOutput] = []

    def keep(output: TextGenerationOutput) -> str:
        seen.append(output)
        return take(output)

    parameters = {"max_new_tokens": 9, "decoder_input_details": True, "details": True}
    pieces(call(keep, {"parameters": parameters}, schema="tgi_compat"), deltas(prefill=True))
    output = seen[-1]
    assert (output.input.input_text, output.input.tgi_compat, output.finished) == ("hi", True, True)
    assert output.input.parameters == {**parameters, "stream": False}
    assert output.input.request_id == output.request_id == output.sequences[0].tokens[0].request_id
    assert output.get_prompt_tokens_as_dict()[1] == {"id": 314, "text": " is", "logprob": -3.5}
    assert output.get_tokens_as_dict()[-1] == {"id": 2, "text": "", "logprob": -0.125, "special": True}
    assert output.sequences[0].cumulative_log_prob == sum(token.log_prob or 0.0 for token in output.sequences[0].tokens)


def test_the_six_arguments_of_28() -> None:
    seen: list[Any] = []

    def legacy(token: Any, first: bool, last: bool, details: Any, generated: str, id: int) -> str:
        seen.append((token.as_dict(), first, last, details, generated))
        return str(token.text).upper()

    body = {"parameters": {"details": True, "return_full_text": True}, **STREAM}
    assert pieces(call(legacy, body, Style.LEGACY), [text("a"), text("b", Finish.EOS)]) == ["A", "B"]
    (token, first, last, details, generated), ending = seen
    assert (token, first, last, generated) == ({"id": 7, "text": "a", "log_prob": -1.0}, True, False, "hi")
    assert (details["finish_reason"], details["inputs"], details["prompt_tokens"]) == (None, "hi", 2)
    assert ending[2:3] + ending[4:] == (True, "hiab")
    assert (ending[3]["finish_reason"], ending[3]["generated_tokens"], len(ending[3]["tokens"])) == ("eos_token", 2, 2)


def test_one_without_an_index_gets_three_values() -> None:
    def three(output: TextGenerationOutput) -> str:
        token, first, last = output.sequences[0].get_next_token()
        return f"[{token.text} {first} {last}]"

    body = {"inputs": "hi"}
    plain = INVOCATIONS["lmi"].parse(body, CONTEXT)
    formatter = OutputFormatter("f", three, Style.OUTPUT, unpacks_index=False)
    found = with_formatter(plain, formatter, body, None, tgi_compat=False)
    assert pieces(found, [text("a"), text("b", Finish.EOS)])[-1] == "[a True False][b False True]"


def test_values_are_changed_before_they_are_framed() -> None:
    def wrap(response_data: dict[str, Any]) -> dict[str, Any]:
        return {"wrapped": response_data}

    sent = pieces(call(wrap, STREAM, Style.VALUE), [text("a"), text("b", Finish.EOS)])
    assert [list(json.loads(line)["wrapped"]) for line in sent] == [["token"], ["token", "generated_text"]]
    assert pieces(call(wrap, {}, Style.VALUE), [text("a", Finish.EOS)]) == ['{"wrapped":{"generated_text":"a"}}']
    (piece,) = pieces(call(wrap, {}, Style.VALUE, "tgi_compat"), [text("a", Finish.EOS)])
    assert json.loads(piece)[0]["wrapped"]["generated_text"] == "a"
    assert pieces(call(wrap, STREAM, Style.VALUE, "tgi_compat"), [text("a", Finish.EOS)])[0].startswith("data: {")


def test_a_request_may_ask_for_a_built_in_formatter() -> None:
    found = call(take, {"parameters": {"output_formatter": "json"}, **STREAM})
    assert (found.formats.title, found.reply.content_type) == ("", "application/json")


def test_chat_completions_keep_their_form() -> None:
    chat = {"inputs": None, "messages": [{"role": "user", "content": "hi"}]}
    assert not call(take, chat).formats.title


# -- what goes wrong ---------------------------------------------------------------------------------------------


def fails(output: Any) -> str:
    raise KeyError("secret")


@in_one_test(
    ("function", "wanted"),
    [
        (fails, "output formatter 'f' of model.py raised KeyError: 'secret'"),
        (lambda output: None, "'f' of model.py returned None; it must return a string"),
        (lambda output: 3, "returned int; it must return a string"),
        (lambda output: b"x", "returned bytes; it must return a string"),
        (lambda output: "\ud800", "returned a lone surrogate"),
    ],
)
def test_bad_code_is_named(function: Function, wanted: str) -> None:
    found = call(function, STREAM)
    with pytest.raises(FormatterFailed) as caught:
        found.reply.feed(0, text("a"))
    assert wanted in caught.value.message
    assert "secret" not in caught.value.public
    failure = found.reply.feed(0, Delta(1, 0, (), Finish.ERROR, caught.value))
    assert (json.loads(failure)["error"], json.loads(failure)["code"]) == (caught.value.message, 424)
    assert json.loads(found.errors.whole(caught.value).body)["error"] == caught.value.message


@in_one_test("function", [lambda value: None, lambda value: {"x": object()}, fails])
@in_one_test("body", [{}, STREAM])
def test_bad_changes_are_named(function: Function, body: dict[str, Any]) -> None:
    with pytest.raises(FormatterFailed):
        call(function, body, Style.VALUE).reply.feed(0, text("a", Finish.EOS))


def test_an_engines_failure_does_not_go_through_the_users_code() -> None:
    found = call(take, STREAM)
    assert found.reply.feed(0, text("a"))
    failure = found.reply.feed(0, Delta(1, 0, (), Finish.ERROR, GenerationFailed("it died")))
    assert (json.loads(failure)["error"], json.loads(failure)["code"]) == ("it died", 424)
    assert found.reply.finished


# -- input formatters --------------------------------------------------------------------------------------------


def add_limits(decoded_payload: dict[str, Any], tokenizer: Any = None, **kwargs: Any) -> dict[str, Any]:
    """As LMI's documented input formatters do, whatever the body is."""
    decoded_payload.setdefault("parameters", {}).setdefault("max_new_tokens", 256)
    decoded_payload["parameters"].setdefault("temperature", 0.7)
    return decoded_payload


@in_one_test(
    ("schema", "body"),
    [
        *((schema, {"inputs": "a"}) for schema in ("lmi", "lmi_async")),
        *((schema, {"messages": [{"role": "user", "content": "a"}]}) for schema in ("lmi", "lmi_async")),
        ("lmi_async", {"prompt": "a"}),  # in rolling batch it is none of LMI's
    ],
)
def test_lmis_documented_input_formatters_serve_every_body(schema: str, body: dict[str, Any]) -> None:
    read, _ = reader(add_limits, payload=True, tokenizer=None).read(json.dumps(body).encode(), {})
    parsed = INVOCATIONS[schema].parse(read, CONTEXT)
    assert (parsed.requests[0].sampling.max_new_tokens == 256) is ("inputs" in body)
    assert ("parameters" in parsed.ignored) is ("inputs" not in body)


def reader(function: Function, *, payload: bool = False, **keywords: Any) -> CustomReader:
    return CustomReader(InputFormatter("f", function, payload, None), decode, keywords)


def read(function: Function, body: bytes = b"{}", **more: Any) -> dict[str, Any]:
    return reader(function, **more).read(body, {"content-type": "x/y"})[0]


def test_an_input_has_djl_pythons_getters() -> None:
    def look(input_item: Any, **kwargs: Any) -> dict[str, Any]:
        assert input_item.get_property("Content-Type") == "x/y"
        assert input_item.get_properties() == {"content-type": "x/y"}
        assert input_item.get_as_json() == {"a": "é"}
        assert input_item.get_as_bytes("data") == input_item.get_content().get("data") == '{"a": "é"}'.encode()
        assert (input_item.contains_key("data"), input_item.contains_key("seed")) == (True, False)
        assert (input_item.get_batches(), input_item.is_empty()) == ([input_item], False)
        return {"inputs": input_item.get_as_string(), **kwargs}

    assert read(look, '{"a": "é"}'.encode(), more=1) == {"inputs": '{"a": "é"}', "more": 1}


def test_a_request_input_becomes_a_body_and_is_kept() -> None:
    made = TextInput(input_text="hi", parameters={"max_new_tokens": 3, "stop": ("a",)})
    value, given = reader(lambda item: made).read(b"", {})
    assert value == {"inputs": "hi", "parameters": {"max_new_tokens": 3, "stop": ["a"]}}
    assert given is made


def test_its_result_is_checked_like_any_body() -> None:
    parse = INVOCATIONS["lmi"].parse
    value = read(lambda item: TextInput(input_text="hi", parameters={"top_p": 7}))
    with pytest.raises(InvalidParameter, match="top_p=7"):
        parse(value, CONTEXT)
    value = read(lambda item: {"inputs": "hi", "model": "x", "parameters": {"foo": 1}})
    assert parse(value, CONTEXT).ignored == ["model", "parameters.foo"]
    value = read(lambda item: TextInput(input_text="hi", adapters=["x"]))
    with pytest.raises(InvalidPayload, match="adapters"):
        parse(value, CONTEXT)


def test_a_payload_comes_decoded() -> None:
    assert read(lambda value: {"inputs": value["q"]}, b'{"q": "hi"}', payload=True) == {"inputs": "hi"}
    with pytest.raises(InvalidPayload, match="not valid JSON"):
        read(lambda value: value, b"{", payload=True)


def test_keywords_go_only_to_who_takes_them() -> None:
    formatter = InputFormatter("f", lambda item: {"inputs": "x"}, False, frozenset())
    found = CustomReader(formatter, lambda body: None, {"tokenizer": 1}).read(b"", {})
    assert found == ({"inputs": "x"}, None)


@in_one_test(
    ("function", "wanted"),
    [
        (fails, "raised KeyError: 'secret'"),
        (lambda item: None, "returned None; it must return a RequestInput with input_text, or a dict"),
        (lambda item: "text", "returned str; it must"),
        (lambda item: RequestInput(), "returned RequestInput; it must"),
        (lambda item: TextInput(), "returned TextInput; it must"),
        (lambda item: {"inputs": object()}, "returned something that is not JSON"),
        (lambda item: {"inputs": "\ud800"}, "returned something that is not JSON"),
        (lambda item: {"inputs": "a", "parameters": {"top_p": float("nan")}}, "returned something that is not JSON"),
        (lambda item: exit(), "raised SystemExit"),
    ],
)
def test_bad_input_code_is_named(function: Function, wanted: str) -> None:
    with pytest.raises(FormatterFailed) as caught:
        read(function)
    assert wanted in caught.value.message
    assert "'f' of model.py" in caught.value.message


# -- what they may do to the objects that they are given ---------------------------------------------------------------


class Evil(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def spoils(change: Callable[[TextGenerationOutput], object]) -> Function:
    def write(output: TextGenerationOutput) -> str:
        change(output)
        return "x"

    return write


def raises(error: BaseException) -> Any:
    raise error


@in_one_test(
    "change",
    [
        lambda output: output.sequences.clear(),
        lambda output: setattr(output, "sequences", None),
        lambda output: setattr(output, "best_sequence_index", 7),
        lambda output: setattr(output.sequences[0], "cumulative_log_prob", "x"),
        lambda output: raises(Evil()),
        lambda output: raises(SystemExit(3)),
    ],
    ids=["cleared", "none", "index", "log_prob", "evil", "exit"],
)
def test_spoilt_objects_are_that_formatters_failure(change: Callable[[TextGenerationOutput], object]) -> None:
    with pytest.raises(FormatterFailed, match=r"^output formatter 'f' of model\.py"):
        pieces(call(spoils(change), STREAM), [text("a"), text("b"), text("c", Finish.EOS)])


def test_a_request_ends_when_it_has_ended() -> None:
    found = call(spoils(lambda output: setattr(output, "finished", False)), STREAM)
    assert "".join(pieces(found, [text("a"), text("b", Finish.EOS)])) == "xx"


class Trap(TextInput):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property
    def input_text(self) -> Any:
        raise self.error


class Endless(dict[str, Any]):
    def items(self) -> Any:
        raise SystemExit(3)

    __iter__ = keys = items


@pytest.mark.parametrize(
    "made", [Trap(ValueError("no")), Trap(SystemExit(3)), Trap(Evil()), Endless(inputs="a")],
    ids=["property", "exit", "evil", "dict"],
)  # fmt: skip
def test_results_that_bite_are_that_formatters_failure(made: Any) -> None:
    reader = CustomReader(InputFormatter("f", lambda payload: made, True, None), lambda body: {}, {})
    with pytest.raises(FormatterFailed, match=r"^input formatter 'f' of model\.py"):
        reader.read(b"{}", {})


# -- the thread of a model.py's functions: one call at a time, each with a limit from when it starts -------------------


LIMIT = 0.5


@pytest.fixture
def thread() -> Iterator[FormatterThread]:
    found = FormatterThread(lambda call: None, LIMIT)
    yield found
    found.close()


def test_results_and_errors_come_back(thread: FormatterThread) -> None:
    assert thread.submit("f", max, 1, 2).result(30) == 2
    with pytest.raises(SystemExit):
        thread.submit("f", exit).result(30)
    assert thread.submit("f", max, 1, 2).result(30) == 2


def test_the_wait_for_the_thread_does_not_count(thread: FormatterThread) -> None:
    calls = [thread.submit("f", time.sleep, LIMIT / 5) for _ in range(7)]
    assert [call.result(30) for call in calls] == [None] * 7


def test_those_behind_a_hung_call_are_run_when_its_time_is_up(thread: FormatterThread) -> None:
    free = threading.Event()
    hung = thread.submit("the one", free.wait, 30)
    behind = [thread.submit("f", max, 1, number) for number in range(8)]
    with pytest.raises(FormatterFailed, match=r"the one did not end within 0.5 s"):
        hung.result(30)
    assert [call.result(30) for call in behind] == [1, 1, *range(2, 8)]
    free.set()


def _started_since(before: list[threading.Thread]) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "formatter" and each not in before]


def test_never_two_at_once_whatever_ends_at_the_limit(thread: FormatterThread) -> None:
    """What was given up may go on; beyond that, one call runs at a time."""
    lock = threading.Lock()
    overlaps: list[int] = []

    def alone() -> None:
        if not lock.acquire(blocking=False):
            overlaps.append(1)
            return
        time.sleep(0.001)
        lock.release()

    before = threading.enumerate()
    for number in range(6):  # around the limit
        thread.submit("f", time.sleep, LIMIT * (0.9 + number / 25))
    for _ in range(200):
        last = thread.submit("f", alone)
    last.result(30)
    assert overlaps == []
    # The present one is left; none where the first has never been replaced.
    wait_for(lambda: len(_started_since(before)) <= 1, 10, "those that were given up go on")


def test_what_was_cancelled_is_not_run(thread: FormatterThread) -> None:
    ran: list[int] = []
    thread.submit("f", time.sleep, 0.1)
    assert thread.submit("f", ran.append, 1).cancel()
    thread.submit("f", ran.append, 2).result(30)
    assert ran == [2]
