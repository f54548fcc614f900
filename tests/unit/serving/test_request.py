"""One request in every host: before the engine, and in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import (
    AnswerTooLong,
    GenerationFailed,
    InvalidParameter,
    InvalidPayload,
    Overloaded,
    PromptTooLong,
    ServingError,
    Unavailable,
)
from handler.core.framing import dumps
from handler.core.media import MediaTokens
from handler.core.text import Prompt, Vocabulary
from handler.core.values import (
    PLAIN_TEMPLATE,
    Adapter,
    Delta,
    Finish,
    Objects,
    Pooling,
    Request,
    Sampling,
    TemplateOptions,
    Token,
    Truncation,
)
from handler.engines.base import EngineInfo
from handler.engines.echo.engine import EchoTokenizer
from handler.plugins.functions import Formatters, OutputFormatter, Style
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect, Formats, ParsedRequest
from handler.protocols.registry import INVOCATIONS, ROUTES
from handler.serving.encoder import LONG, MAX_LOGITS, is_long
from handler.serving.head import ATTRIBUTES, QUERY_ADAPTER, Head, request_id
from handler.serving.preprocessor import Preprocessor
from handler.serving.request.task import RequestTask, ignored_header
from tests.limits import undocumented
from tests.one_test import in_one_test
from tests.stepped import Bench, ask, benches, requests_ended, text_of
from tests.unit.protocols.answers import with_adapters

__all__ = ["benches"]
# -- preprocess --------------------------------------------------------------------------------------------------------
# What every host does with a request: adapters in headers, prompts as ids, ids that no vocabulary has, sizes.


IDENTIFIER = "x-amzn-sagemaker-adapter-identifier"
BIG = Vocabulary([b"a", b"b"] * 10_000)


class Letters:
    """A tokenizer whose tokens are letters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary: Vocabulary | None = vocabulary
        self.chat_template = ""
        self.media_tokens: Mapping[str, MediaTokens] = {}

    def encode(self, text: str) -> Prompt:
        assert self.vocabulary is not None
        return Prompt(text, [self.vocabulary.pieces.index(letter.encode()) for letter in text], self.vocabulary)

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        return self.encode(messages[-1]["content"])


ONE = Adapter("one", 1, "/one")
CONTEXT = with_adapters(ServerContext(engine="able"), ONE, Adapter("two", 2, "/two"))


def intake(schema: str = "lmi", vocabulary: Vocabulary = BIG, **context: Any) -> Preprocessor:
    info = EngineInfo("able", "1", "none", "none", 1000)
    return Preprocessor(INVOCATIONS[schema], replace(CONTEXT, **context), Letters(vocabulary), lambda: info)


def parse(preprocessor: Preprocessor, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> ParsedRequest:
    head = preprocessor.read_head(Head(headers))
    return preprocessor.parse(preprocessor.decode(body, head), head)


def adapters(body: dict[str, Any], headers: dict[str, str], schema: str = "lmi") -> list[str | None]:
    requests = parse(intake(schema), json.dumps(body).encode(), headers).requests
    return [request.adapter.name if request.adapter else None for request in requests]


def test_requests_for_an_adapter_share_the_parameters_that_were_read_before() -> None:
    preprocessor = intake()
    sizes = []
    for headers in ({"adapter": "one"}, {"adapter": "two"}):
        assert parse(preprocessor, b'{"inputs": "a", "parameters": {"max_new_tokens": 7}}', headers).requests
        sizes.append(len(preprocessor.context.parsed))
    assert sizes == [1, 1]


@pytest.mark.parametrize("name", [IDENTIFIER, "adapter"])
def test_a_header_names_the_adapter(name: str) -> None:
    assert adapters({"inputs": "a"}, {name: "one"}) == ["one"]
    assert adapters({"inputs": "a", "adapters": "one"}, {name: "one"}) == ["one"]
    assert adapters({"inputs": "a"}, {name: ""}) == [None]
    assert adapters({"messages": [{"role": "user", "content": "a"}]}, {name: "two"}) == ["two"]
    assert adapters({"inputs": ["a", "b"]}, {name: "two"}, "dynamic_batch") == ["two", "two"]


@pytest.mark.parametrize("attributes", ["adapter=one", "a=b; adapter=one", "adapter=one;route=/generate"])
def test_custom_attributes_name_the_adapter(attributes: str) -> None:
    assert adapters({"inputs": "a"}, {ATTRIBUTES: attributes}) == ["one"]
    assert adapters({"inputs": "a"}, {ATTRIBUTES: "my-adapter=one"}) == [None]


def test_a_query_names_the_adapter() -> None:
    assert adapters({"inputs": "a"}, {QUERY_ADAPTER: "one"}) == ["one"]


BODIES: dict[str, list[dict[str, Any]]] = {
    "lmi_async": [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}],
    "lmi": [{"messages": [{"role": "user", "content": "a"}]}, {"inputs": "a"}],
    "/v1/completions": [{"prompt": "a"}],
    "/v1/chat/completions": [{"messages": [{"role": "user", "content": "a"}]}],
}


@in_one_test(("schema", "body"), [(schema, body) for schema, bodies in BODIES.items() for body in bodies])
@in_one_test("model", [{}, {"model": "model"}, {"model": "one"}, {"model": "other"}])
def test_the_adapter_of_a_header_is_the_answers_model(schema: str, body: dict[str, Any], model: dict[str, str]) -> None:
    """LMI puts it in the place of the body's `model`, whatever that says."""
    dialect = {**INVOCATIONS, **ROUTES}[schema]
    formatters = Formatters(output=OutputFormatter("f", bool, Style.OUTPUT))
    info = EngineInfo("able", "1", "none", "none", 1000)
    made = Preprocessor(dialect, CONTEXT, Letters(BIG), lambda: info, formatters)
    for headers in ({IDENTIFIER: "one"}, {"adapter": "one"}):
        parsed = parse(made, json.dumps({**body, **model}).encode(), headers)
        (request,) = parsed.requests
        assert request.adapter == ONE
        reply = parsed.formats.as_openai() if parsed.formats.as_openai is not None else parsed.reply
        reply.start(0, 1)
        answer = reply.feed(0, Delta(0, 0, [Token(0, "a", -0.5, False)], Finish.LENGTH))
        assert json.loads(answer)["model"] == "one"


@pytest.mark.parametrize("schema", ["lmi_async", "lmi"])
def test_a_model_that_is_another_adapter_contradicts_the_header(schema: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "model": "two"}
    with pytest.raises(InvalidPayload, match=r"^model: 'two' contradicts the adapter 'one'$"):
        adapters(body, {IDENTIFIER: "one"}, schema)


@in_one_test(
    ("body", "headers", "wanted"),
    [
        ({}, {IDENTIFIER: "three"}, f"header {IDENTIFIER}: 'three': no adapter with that name is registered"),
        (
            {},
            {"adapter": "\t" + "x" * 1000},
            f"header adapter: '\\t{'x' * 79}...': no adapter with that name is registered",
        ),
        ({}, {IDENTIFIER: "one", "adapter": "two"}, "header adapter: 'two' contradicts the adapter 'one'"),
        ({}, {ATTRIBUTES: "adapter=three"}, "header adapter: 'three': no adapter with that name is registered"),
        ({}, {QUERY_ADAPTER: "three"}, "query parameter adapter: 'three': no adapter with that name is registered"),
        ({}, {QUERY_ADAPTER: "one", "adapter": "two"}, "query parameter adapter: 'one' contradicts the adapter 'two'"),
        ({"adapters": "two"}, {IDENTIFIER: "one"}, "the body: 'two' contradicts the adapter 'one'"),
        (
            {"parameters": {"lora_task_id": 2}},
            {"adapter": "one"},
            "parameters.lora_task_id: 'two' contradicts the adapter 'one'",
        ),
    ],
)
def test_what_no_adapter_has_or_another_place_denies_is_refused(
    body: dict[str, Any], headers: dict[str, str], wanted: str
) -> None:
    with pytest.raises(InvalidPayload) as caught:
        adapters({"inputs": "a", **body}, headers)
    assert str(caught.value) == wanted


def test_without_adapters_a_header_is_refused_before_the_body_is_read() -> None:
    with pytest.raises(
        InvalidPayload, match=rf"^header {IDENTIFIER}: 'one': the engine able serves no LoRA adapters: no\.$"
    ):
        intake(no_adapters="no.").read_head(Head({IDENTIFIER: "one"}))


# -- prompts -----------------------------------------------------------------------------------------------------


def encode(request: Request, vocabulary: Vocabulary = BIG) -> Prompt:
    return intake(vocabulary=vocabulary).encoder.encode(request)[1]


def refusal(request: Request, vocabulary: Vocabulary = BIG) -> str:
    with pytest.raises(ServingError) as caught:
        encode(request, vocabulary)
    return caught.value.message


def test_ids_are_the_prompt_as_they_are() -> None:
    found = encode(Request("as shown", prompt_ids=(1, 0, 1)))
    assert (found.text, found.ids, found.vocabulary) == ("as shown", [1, 0, 1], BIG)
    assert encode(Request("", prompt_ids=(1, 0, 1), truncation=Truncation(2))).ids == [0, 1]


def test_a_body_of_ids_goes_through_to_the_prompt() -> None:
    made = intake()
    (request,) = parse(made, b'{"parameters": {"input_ids": [[0, 1, 0]]}}').requests
    assert request.prompt == "aba"
    assert made.encoder.encode(request)[1].ids == [0, 1, 0]


def test_ids_that_are_none_are_refused() -> None:
    assert refusal(Request("", prompt_ids=())) == "'inputs' has no tokens"
    assert "inputs: 20000 is not in the vocabulary" in refusal(Request("", prompt_ids=(20_000,)))
    assert "inputs: -1 is not in the vocabulary" in refusal(Request("", prompt_ids=(-1,)))
    bare = Preprocessor(INVOCATIONS["lmi"], CONTEXT, EchoTokenizer(), lambda: None)
    with pytest.raises(InvalidPayload, match="no vocabulary of its own; send text"):
        bare.encoder.encode(Request("", prompt_ids=(1,)))


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(stop_token_ids=(20_000,)), "parameters.stop_token_ids: 20000 is not in the vocabulary of 20000"),
        (Sampling(bad_token_ids=(20_000,)), "parameters.bad_words_list: 20000 is not"),
        (Sampling(logit_bias=((20_000, 1.0),)), "parameters.logit_bias: 20000 is not"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_by_name(sampling: Sampling, wanted: str) -> None:
    assert refusal(Request("a", sampling)).startswith(wanted)


def test_the_context_holds_prompt_and_answer_to_the_last_token() -> None:
    """The engine of `intake` has 1000 tokens."""

    def new_tokens(num_prompt: int, wanted: int, **request: Any) -> int:
        found, _ = intake().encoder.encode(Request("a" * num_prompt, Sampling(max_new_tokens=wanted), **request))
        return found.sampling.max_new_tokens

    assert new_tokens(990, 10) == 10
    assert new_tokens(990, 1 << 30, fill_context=True) == new_tokens(990, 30, fill_context=True) == 10
    assert new_tokens(990, 3, fill_context=True) == 3  # generation_config.json's, say
    assert new_tokens(990, 30, min_free_tokens=10) == 10
    assert new_tokens(999, 30, fill_context=True) == 1
    for num_prompt, request in ((990, {}), (990, {"min_free_tokens": 11})):
        with pytest.raises(AnswerTooLong):
            new_tokens(num_prompt, 11, **request)
    for fill in (False, True):
        with pytest.raises(PromptTooLong, match="999"):
            new_tokens(1000, 1, fill_context=fill)


def test_a_prompt_may_have_a_limit_of_its_own() -> None:
    limited = intake(config=Config(max_input_len=10))
    assert limited.encoder.encode(Request("a" * 10, Sampling(max_new_tokens=500)))
    with pytest.raises(PromptTooLong, match="at most 10"):
        limited.encoder.encode(Request("a" * 11, Sampling(max_new_tokens=1)))


def test_more_logits_than_an_answer_can_hold_are_refused() -> None:
    rows = MAX_LOGITS // len(BIG)
    generation: dict[str, Any] = {"return_generation_logits": True}
    encode(Request("a", Sampling(max_new_tokens=rows, **generation)))
    even = Vocabulary([b"a", b"b"] * (MAX_LOGITS // 64))
    encode(Request("a", Sampling(max_new_tokens=32, **generation)), even)  # exactly as many
    message = refusal(Request("a", Sampling(max_new_tokens=rows + 1, **generation)))
    assert message == (
        f"parameters.outputs: {rows + 1} rows of 20000 logits are too many for one response; at most {rows} "
        "rows are allowed: shorten the prompt or reduce parameters.max_new_tokens"
    )
    assert f"{2 * rows} rows" in refusal(Request("a", Sampling(max_new_tokens=rows, n=2, **generation)))
    both = Sampling(max_new_tokens=rows, return_context_logits=True, **generation)
    assert f"{rows + 1} rows" in refusal(Request("a", both))
    assert f"{rows + 1} rows" in refusal(Request("a" * (rows + 1), Sampling(return_context_logits=True)))
    body = {"inputs": "a" * 60, "parameters": {"return_context_logits": [True]}}
    (request,) = parse(intake(), json.dumps(body).encode()).requests
    with pytest.raises(InvalidParameter, match=r"^parameters\.return_context_logits: 60 rows"):
        encode(request)


# -- ids of requests -----------------------------------------------------------------------------------------------


def test_djls_id_goes_before_sagemakers_and_that_before_the_clients() -> None:
    headers = {"x-request-id": "client", "x-amzn-sagemaker-inference-id": "sagemaker", "requestid": "djl"}
    for name, wanted in (
        ("requestid", "djl"),
        ("x-amzn-sagemaker-inference-id", "sagemaker"),
        ("x-request-id", "client"),
    ):
        assert request_id(headers) == wanted
        headers[name] = "not\nharmless"
    assert request_id(headers) != request_id(headers), "each gets one of its own"


@pytest.mark.parametrize(
    "long",
    [
        Request("a" * LONG),
        Request("query", pooling=Pooling("score"), pair="a" * LONG),
        Request("", messages=({"role": "user", "content": [{"type": "text", "text": "a" * LONG}]},)),
    ],
)
def test_long_texts_are_told_wherever_they_stand(long: Request) -> None:
    assert is_long(long)
    assert not is_long(long._replace(prompt="", pair="a", messages=()))


# -- one request in flight: what its host is told and may take, however it ends ----------------------------------------


OUTCOMES = ("ok", "failed", "refused", "overloaded", "unavailable", "cancelled")


class Begun:
    """A request that has begun: its first token has come. `told` counts the host's callbacks."""

    def __init__(self, bench: Bench, body: Any, schema: Dialect | None = None) -> None:
        self.bench = bench
        self.told = 0
        self.task = bench.model.open({}, schema, on_bytes=self._on_bytes)
        self.task.begin(self.task.run(body if isinstance(body, bytes) else dumps(body)))
        while not self.task.begun:
            bench.loop.wait(0.05)

    def _on_bytes(self, task: RequestTask) -> None:
        self.told += 1
        self.bench.loop.stop()

    def end(self) -> bytes:
        while not self.task.finished:
            self.bench.loop.wait(0.05)
        return self.task.take()


def test_the_host_of_a_non_streaming_response_hears_its_start_and_end() -> None:
    request = Begun(Bench(), ask("a b", 8))
    assert (request.told, request.task.finished, request.task.unsent) == (1, False, [])
    assert json.loads(request.end()) == {"generated_text": " a b" * 4}
    assert request.told == 2


def test_a_stream_that_fails_before_its_bytes_are_taken_keeps_them() -> None:
    request = Begun(Bench(), ask("a b", 8, stream=True))
    request.task.fail(GenerationFailed("gone"))
    token, error = map(json.loads, request.end().splitlines())
    assert token["token"]["text"] == " a"
    assert error["details"]["finish_reason"] == "error"
    assert (request.task.status, request.task.error) == (200, None)


def test_a_whole_answer_that_fails_is_a_refusal_alone() -> None:
    request = Begun(Bench(), ask("a b", 8))
    request.task.fail(GenerationFailed("gone"))
    assert request.told == 2, "not at the engine's next step"
    answer = json.loads(request.end())
    assert (answer["code"], answer["error"], answer["generated_text"]) == (424, "gone", "")
    assert request.task.status == 424


def test_a_refusal_takes_the_place_of_bytes_that_nobody_took() -> None:
    request = Begun(Bench(), ask("a b", 8, stream=True))
    assert request.task.unsent
    request.task.refuse(GenerationFailed("gone"))
    assert request.told == 2
    (line,) = request.end().splitlines()
    assert (json.loads(line)["error"], request.task.status) == ("gone", 424)


def test_a_refusal_while_the_body_is_parsed_on_a_thread_stands() -> None:
    bench = Bench()
    task = bench.model.open({})
    task.begin(task.run(dumps(ask("word " * 20_000, 2, stream=True))))
    bench.loop.poll()
    assert task.content_type == "application/json"  # DJL before 0.29 asks before it is known
    task.refuse(GenerationFailed("gone"))
    while asyncio.all_tasks(bench.model.driver.loop):
        bench.loop.wait(0.05)
    assert (task.parsed, task.status, json.loads(task.take())["error"]) == (None, 424, "gone")


def test_a_refusal_has_none_of_the_dialects_headers() -> None:
    request = Begun(Bench(), ask("a b", 8), ROUTES["/generate"])
    assert dict(request.task.dialect_headers())["x-compute-characters"] == "3"
    request.task.fail(GenerationFailed("gone"))
    assert request.task.dialect_headers() == ()


@in_one_test(
    ("body", "error", "outcome"),
    [
        (b"{", None, "refused"),
        (ask("a b", 8), GenerationFailed("gone"), "failed"),
        (ask("a b", 8, stream=True), GenerationFailed("gone"), "failed"),
        (ask("a b", 8), Unavailable("stopping"), "unavailable"),
        (ask("a b", 8), Overloaded("full"), "overloaded"),
        (ask("a b", 2), None, "ok"),
    ],
)
def test_each_request_is_counted_once_by_its_outcome(body: Any, error: ServingError | None, outcome: str) -> None:
    bench = Bench()
    request = Begun(bench, body)
    if error is not None:
        request.task.fail(error)
    request.end()
    counts = {label: requests_ended(bench.model.metrics, label) for label in OUTCOMES}
    assert counts == {label: int(label == outcome) for label in OUTCOMES}


def test_the_tokens_of_all_prompts_are_counted() -> None:
    bench = Bench("disable")
    Begun(bench, ask(["a b", "c d e"], 2)).end()
    assert bench.model.metrics.registry.get_sample_value("lmi_prompt_tokens_total") == 5


def test_nothing_comes_after_the_end() -> None:
    for stream in (True, False):
        request = Begun(Bench(), ask("a b", 2, stream=stream))
        body, told = request.end(), request.told
        assert text_of(body) == " a b"
        for end in (request.task.fail, request.task.refuse):
            end(GenerationFailed("gone"))
        request.task.close()
        assert (request.task.take(), request.task.status, request.task.error, request.told) == (b"", 200, None, told)


TENSORS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a b"]},
    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [8]},
]
INFER = ROUTES["/v2/models/{model}/infer"]


def test_a_request_is_stopped_by_its_own_id_and_owner_alone() -> None:
    bench = Bench()
    request = Begun(bench, {"id": "7", "inputs": TENSORS}, INFER)
    assert [request.task.is_of(*who) for who in (("7", ""), ("8", ""), ("7", "ann"), ("", ""))] == [True, *[False] * 3]
    request.task.stop()
    (tensor,) = json.loads(request.task.take())["outputs"]
    assert tensor["data"] == ["a b a"]
    bench.loop.poll()
    assert bench.batcher.idle
    assert not request.task.is_of("7", ""), "it has ended"
    assert requests_ended(bench.model.metrics, "ok") == 1


def test_a_request_that_has_not_started_can_be_stopped() -> None:
    bench = Bench()
    task = bench.model.open({}, INFER)
    assert not task.is_of("7", ""), "it is not read yet"
    bench.loop.run(task.parse(dumps({"id": "7", "inputs": TENSORS})))
    task.stop()
    assert (task.finished, json.loads(task.take())["outputs"][0]["data"]) == (True, ["a b"])
    task.begin(task.run())
    assert bench.batcher.idle


def test_a_response_that_a_thread_writes_is_not_stopped() -> None:
    request = Begun(Bench(), {"id": "7", "inputs": TENSORS}, INFER)
    parsed, ending = request.task.parsed, Delta(0, 0, (), Finish.LENGTH)
    assert parsed is not None
    written = parsed.reply.feed(0, ending)  # on the thread, which takes long
    request.task.stop()
    assert not request.task.finished
    request.task._put(written, ending)
    assert json.loads(request.task.take())["outputs"][0]["data"] == ["a b a"]


def test_a_response_that_user_code_formats_is_not_stopped() -> None:
    request = Begun(Bench(), {"id": "7", "inputs": TENSORS}, INFER)
    parsed = request.task.parsed
    assert parsed is not None
    request.task.parsed = parsed._replace(formats=Formats(title="output formatter"))
    request.task.stop()
    assert not request.task.finished
    assert json.loads(request.end())["outputs"][0]["data"] == ["a b" + " a b" * 4]


def test_a_cancelled_request_leaves_the_engine() -> None:
    bench = Bench()
    request = Begun(bench, ask("a b", 8, stream=True))
    request.task.close()
    bench.loop.poll()
    assert bench.batcher.idle
    assert requests_ended(bench.model.metrics, "cancelled") == 1


def test_bytes_are_taken_up_to_a_limit_at_a_characters_end() -> None:
    request = Begun(Bench(), ask("a b", 8, stream=True))
    task = request.task
    task.unsent[:] = ["aé€".encode(), "😀z".encode()]
    assert not task.committed
    assert [task.take(limit).decode() for limit in (2, 2, 3, 5, 100, 5)] == ["a", "é", "€", "😀z", "", ""]
    assert task.committed
    task.unsent[:] = ["aé€".encode()]
    assert [task.take(limit).decode() for limit in (3, 2**20)] == ["aé", "€"]
    task.unsent[:] = [b"a", b"b"]
    assert task.take() == b"ab"
    assert task.unsent == []


def test_nothing_taken_commits_to_nothing() -> None:
    request = Begun(Bench(), ask("a b", 8))
    assert request.task.take() == b""
    assert not request.task.committed


def test_a_header_that_is_missing_is_empty() -> None:
    bench = Bench()
    with bench.model.open({"accept": "text/plain"}) as task:
        assert [task.header(name) for name in ("accept", "range")] == ["text/plain", ""]


def test_the_dialects_bug_ends_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bad, good = Begun(bench, ask("a b", 8)), Begun(bench, ask("a b", 4))
    assert bad.task.parsed is not None
    monkeypatch.setattr(bad.task.parsed.reply, "feed", lambda index, delta: 1 / 0)
    bad.task.feed_and_flush(0, Delta(1, 0, (), Finish.LENGTH))
    assert bad.task.finished
    assert bad.task.status == 500
    assert text_of(good.end()) == " a b" * 2


def test_a_response_that_finds_no_memory_is_refused() -> None:
    bench = Bench()
    request = Begun(bench, ask("a b", 8))
    memory = bench.model.admission.memory
    memory.most = memory._spare = 0
    memory._beside = -1
    answer = json.loads(request.end())
    assert (answer["code"], request.task.status) == (503, 503)
    assert "all requests together need too much memory (option.requests_total_bytes)" in answer["error"]
    assert requests_ended(bench.model.metrics, "overloaded") == 1


def test_a_closed_request_gives_its_memory_back() -> None:
    bench = Bench()
    request = Begun(bench, ask("a b", 2))
    assert bench.model.admission.memory.taken > 0
    request.end()
    request.task.close()
    request.task.close()
    assert bench.model.admission.memory.taken == bench.model.num_requests == 0


def test_a_refused_request_may_be_tried_again_when_its_server_says_so() -> None:
    bench = Bench()
    error = Overloaded("full")
    error.retry_after = 7.0
    busy, broken = bench.model.refused(error), bench.model.refused(GenerationFailed("gone"))
    assert (busy.retry_after, busy.take_whole().retry_after, busy.status) == (7.0, 7.0, 503)
    assert (broken.retry_after, broken.status, broken.streams, broken.keep_alive) == (0.0, 424, False, b"")


def test_ignored_names_are_a_header_that_sagemaker_forwards() -> None:
    assert ignored_header([]) == {}
    assert ignored_header(["a[0].b", "ä b"]) == {"x-lmi-ignored-parameters": "a[0].b, %C3%A4%20b"}
    cut = ignored_header(["n" * 70, *map(str, range(40))])["x-lmi-ignored-parameters"]
    assert cut == ", ".join(["n" * 64, *map(str, range(31))])
    assert len(ignored_header(["n" * 64] * 32)["x-lmi-ignored-parameters"]) == 1024


def test_the_number_of_logits_is_documented() -> None:
    assert not undocumented("wire/other.md", f"at most {MAX_LOGITS:,} logits")


def test_a_stream_of_which_nothing_was_sent_fails_as_a_whole() -> None:
    bench = Bench()
    request = Begun(bench, ask("a b", 8, stream=True))
    request.task.unsent.clear()
    request.task.fail(GenerationFailed("gone"))
    assert (request.task.status, request.task.streams) == (424, False)
    sent = Begun(bench, ask("a b", 8, stream=True))
    sent.task.take()
    sent.task.fail(GenerationFailed("gone"))
    assert (sent.task.status, sent.task.streams) == (200, True)


def test_batches_have_half_of_the_engine_unless_an_option_says_so() -> None:
    model = Bench().model
    for size, lines, wanted in ((9, 0, 4), (1, 0, 1), (9, 7, 7)):
        model.config = replace(model.config, max_rolling_batch_size=size, batches_concurrency=lines)
        assert model.max_batch_lines == wanted
    assert model.max_sequences == 9


def test_while_no_engine_is_loaded_nothing_limits_a_prompt() -> None:
    made = Preprocessor(INVOCATIONS["lmi"], CONTEXT, Letters(BIG), lambda: None)
    assert made.encoder.max_tokens() is None
    request = Request("ab" * 9999, Sampling(max_new_tokens=1 << 30), truncation=Truncation())
    found, prompt = made.encoder.encode(request)
    assert (len(prompt.ids), found.sampling.max_new_tokens) == (19_998, 1 << 30)


def test_a_prompt_is_truncated_to_leave_room_for_its_answer() -> None:
    def left(**more: Any) -> int:
        request = Request("a" * 2000, truncation=Truncation(), **more)
        return len(intake().encoder.tokenize(request).ids)

    assert left(sampling=Sampling(max_new_tokens=10)) == 990
    assert left(sampling=Sampling(max_new_tokens=10), fill_context=True) == 999
    assert left(sampling=Sampling(max_new_tokens=10), min_free_tokens=4) == 996
    assert left(sampling=Sampling(max_new_tokens=5000)) == 1
