"""The head of a request and its body's form: headers that mean something, content types, and large bodies."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from handler.config.config import Config
from handler.core.errors import InvalidPayload, NotJson, ServingError, UnsupportedMedia
from handler.core.owners import names_of, owner_by_key
from handler.core.values import Request, Task
from handler.engines.base import EngineInfo
from handler.engines.echo.engine import EchoTokenizer
from handler.protocols.kernel.body import decoded_size
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import BinaryBody
from handler.protocols.openai.audio import Transcriptions
from handler.protocols.registry import INVOCATIONS, ROUTES
from handler.serving import admission, quota
from handler.serving.admission import INVOKE, InferenceRoutes, memory_quota
from handler.serving.head import (
    ATTRIBUTES,
    KEY_HEADERS,
    OWNER,
    Head,
    bearer_token,
    in_attributes,
    media_type,
    owner_of,
    request_id,
    unchecked_owner,
)
from handler.serving.large_bodies import LARGE, MOST_DECODED
from handler.serving.preprocessor import Preprocessor, check_task
from handler.serving.quota import Count
from tests.limits import KIB, undocumented
from tests.one_test import in_one_test

INFO = EngineInfo("able", "1", "none", "none", 1000)


def preprocessor(schema: str = "lmi", *, whole: bool = False, **context: Any) -> Preprocessor:
    known = replace(ServerContext(engine="able"), **context)
    return Preprocessor(INVOCATIONS[schema], known, EchoTokenizer(), lambda: INFO, whole=whole)


def of(headers: Mapping[str, str], route: str = "", **context: Any) -> Head:
    routes = {**ROUTES, "/v1/audio/transcriptions": Transcriptions()}
    return preprocessor(**context).read_head(Head(headers, routes[route] if route else None))


# -- headers -----------------------------------------------------------------------------------------------------


@in_one_test(
    ("value", "token"),
    [
        ("Bearer a", "a"),
        ("bearer  a b ", "a b"),
        (" BEARER a", "a"),
        ("Basic a", ""),
        ("Bearer", ""),
        ("", ""),
        ("a", ""),
    ],
)
def test_a_bearers_token(value: str, token: str) -> None:
    assert bearer_token(value) == token


def test_an_owner_is_the_one_that_the_host_names() -> None:
    assert owner_of({OWNER: "ann", "x-api-key": "k"}) == of({OWNER: "ann", "x-api-key": "k"}).owner == "ann"
    assert owner_of({OWNER: "", "x-api-key": "k"}) == ""
    assert owner_of({"x-api-key": "k"}) == of({"x-api-key": "k"}).owner == ""


@in_one_test(
    ("headers", "key"),
    [
        ({}, ""),
        ({"authorization": "Bearer ann"}, "ann"),
        ({"authorization": "bearer  ann "}, "ann"),
        ({"x-api-key": " ann ", "authorization": "Basic bob"}, "ann"),
        ({"x-api-key": " ", "authorization": "Bearer ann"}, "ann"),
        ({"authorization": "AWS4-HMAC-SHA256 Credential=x, Signature=y"}, ""),
        ({"authorization": "Basic ann"}, ""),
        ({"x-user": "bob", "authorization": "Bearer ann"}, "ann"),
        ({OWNER: "bob", "x-api-key": "ann"}, "ann"),
    ],
)
def test_an_unchecked_key_names_nobody_unless_a_gateway_has_checked_it(headers: dict[str, str], key: str) -> None:
    """Without `option.owner_header` the key names only what an earlier release has stored."""
    of_key = owner_by_key(key) if key else ""
    assert {unchecked_owner(headers, header) for header in KEY_HEADERS} == {of_key}
    everyone = unchecked_owner(headers, None)
    assert everyone == ""
    assert hash(everyone) == hash("")
    assert names_of(everyone) == (("", of_key) if key else ("",))


def test_the_header_that_the_gateway_checks_names_the_owner_whatever_the_client_adds() -> None:
    both = {"authorization": "Bearer a", "x-api-key": "k"}
    assert unchecked_owner(both, "authorization") == owner_by_key("a")
    assert unchecked_owner(both, "x-api-key") == owner_by_key("k")
    assert unchecked_owner({**both, "authorization": ""}, "authorization") == owner_by_key("k")
    assert names_of(unchecked_owner(both, None)) == ("", owner_by_key("k"))


def test_a_gateway_names_owners_in_a_header_of_its_own() -> None:
    ann, key = unchecked_owner({"x-user": "ann", "x-api-key": "k"}, "x-user"), owner_by_key("k")
    assert names_of(ann) == (ann,)
    assert len({ann, key, owner_by_key("ann"), unchecked_owner({"x-user": "bob"}, "x-user"), ""}) == 5
    assert unchecked_owner({"x-api-key": "k"}, "x-user") == "" == unchecked_owner({"x-user": " "}, "x-user")
    assert len(owner_by_key("k")) == 64
    assert "k" != owner_by_key("k") != owner_by_key("l")


def test_an_encoding_is_what_is_not_identity() -> None:
    assert Head({"content-encoding": " GZIP "}).encoding == "gzip"
    assert Head({"content-encoding": "identity"}).encoding == ""
    assert Head().encoding == ""


@in_one_test(
    ("value", "wanted"),
    [("Application/JSON; charset=utf-8", "application/json"), (" a/b ", "a/b"), ("", ""), (";a", "")],
)
def test_a_media_type_has_no_parameters(value: str, wanted: str) -> None:
    assert media_type({"content-type": value}) == wanted
    assert media_type({}) == ""


@in_one_test(
    ("attributes", "wanted"),
    [("a=1,b=2", "2"), ("b=2;a", "2"), ("a b=2", "2"), ("b=", ""), ("ab=2", None), ("", None), ("b", None)],
)
def test_custom_attributes_have_values_by_name(attributes: str, wanted: str | None) -> None:
    assert in_attributes({ATTRIBUTES: attributes}, "b") == wanted


def test_a_request_id_is_visible_and_short() -> None:
    for good in ("a", "~" * 128, " a "):
        assert request_id({"x-request-id": good}) == good.strip()
    for bad in ("a" * 129, "a b", "é", ""):
        assert request_id({"x-request-id": bad}) != bad


# -- content types -----------------------------------------------------------------------------------------------


@in_one_test(
    "kind",
    [
        "", "application/json", "application/problem+json", "application/x-www-form-urlencoded", "text/plain",
        "application/jsonlines", "application/x-ndjson", "application/jsonl", "application/octet-stream",
        "Application/JSON; charset=utf-8",
    ],
)  # fmt: skip
def test_these_content_types_are_read(kind: str) -> None:
    assert of({"content-type": kind}).media_type == media_type({"content-type": kind})


@in_one_test(
    ("kind", "route", "words"),
    [
        ("text/csv", "", "content type 'text/csv' is not supported; send application/json or text/plain"),
        ("application/+json", "", "content type 'application/+json' is not supported; send application/json or text"),
        ("multipart/form-data", "", "content type 'multipart/form-data' is not supported; send application"),
        ("text/plain", "/v1/completions", "content type 'text/plain' is not supported; send application/json"),
        (
            "text/csv",
            "/v1/audio/transcriptions",
            "send application/json or multipart/form-data, with the audio clip as",
        ),
    ],
)
def test_other_content_types_are_refused_with_what_to_send(kind: str, route: str, words: str) -> None:
    with pytest.raises(UnsupportedMedia) as raised:
        of({"content-type": kind}, route)
    assert words in raised.value.message
    assert raised.value.message.endswith("text/plain") is not bool(route)


def test_tritons_routes_take_any_type_and_packed_bodies() -> None:
    infer = "/v2/models/{model}/infer"
    assert of({"content-type": "text/csv", "content-encoding": "gzip"}, infer).encoding == "gzip"
    assert of({"content-encoding": "deflate"}).encoding == "deflate"
    with pytest.raises(UnsupportedMedia, match=r"^content-encoding 'br' is not supported; accepted: gzip, deflate, z"):
        of({"content-encoding": "br"})
    assert of({"content-encoding": "identity"}).encoding == ""


def test_hosting_of_several_models_is_refused_by_its_header() -> None:
    with pytest.raises(InvalidPayload, match=r"^header x-amzn-sagemaker-target-model: multi-model hosting is not"):
        of({"x-amzn-sagemaker-target-model": "a.tar.gz"})
    of({"x-amzn-sagemaker-target-model": ""})


def test_only_the_configured_dialect_reads_a_prompt_in_plain_text() -> None:
    made = preprocessor()
    head = made.read_head(Head({"content-type": "text/plain"}))
    assert head.is_prompt
    assert not Head({}, ROUTES["/generate"], "text/plain").is_prompt
    assert made.decode(b'{"requestType": "CLOSE"}', head).value == {"inputs": '{"requestType": "CLOSE"}'}
    with pytest.raises(NotJson, match=r"^the body is not UTF-8"):
        made.decode(b"\xff", head)


def test_several_lines_are_told_where_one_is_a_request() -> None:
    made = preprocessor()
    head = made.read_head(Head({"content-type": "application/jsonlines"}))
    assert made.decode(b'\n{"inputs": "a"}\n', head).value == {"inputs": "a"}
    with pytest.raises(
        NotJson, match=r"^application/jsonlines: a request must be one line of JSON, but this body has 2"
    ):
        made.decode(b'{"inputs": "a"}\n \n{"inputs": "b"}\n', head)
    for body, kind in ((b"{\n", "application/jsonlines"), (b"{}\n{}", "application/json")):
        with pytest.raises(NotJson, match=r"^the body is not valid JSON"):
            made.decode(body, made.read_head(Head({"content-type": kind})))


def test_a_large_body_is_decoded_apart_and_its_memory_is_bounded() -> None:
    made = preprocessor()
    head, prompt = made.read_head(Head({})), made.read_head(Head({"content-type": "text/plain"}))
    large, small = b"[" + b"{}," * LARGE + b"{}]", b"[[],[]]"
    assert made.decoded_size(large, head) == decoded_size(large, MOST_DECODED) < decoded_size(large, sys.maxsize)
    assert made.decoded_size(small, head) == decoded_size(small, sys.maxsize)
    assert made.decoded_size(small, prompt) == decoded_size(small, 0)
    with mock.patch.object(made.large_bodies, "decode", return_value=({}, 7)) as decode:
        assert made.decode(bytes(LARGE), head)[::3] == ({}, 7)
        decode.assert_called_once_with(bytes(LARGE), plain=False, unique_keys=False)
        made.decode(bytes(LARGE), prompt)
        assert decode.call_args.kwargs["plain"]
        with pytest.raises(NotJson):
            made.decode(bytes(LARGE - 1), head)
        assert decode.call_count == 2


def test_tensors_follow_the_document_that_a_header_measures() -> None:
    made = preprocessor()
    document = b'{"inputs": []}'
    headers = {"inference-header-content-length": str(len(document)), "content-type": "application/octet-stream"}
    head = made.read_head(Head(headers, ROUTES["/v2/models/{model}/infer"]))
    assert made.decode(document + b"\x01\x02", head).value == BinaryBody(
        {"inputs": []}, b"\x01\x02", "application/octet-stream"
    )


# -- what a request is for ---------------------------------------------------------------------------------------


def test_a_request_for_another_task_is_refused_with_the_routes_of_this() -> None:
    check_task(Request("a"), Task.GENERATION)
    check_task(Request("a", transcribes=True), Task.TRANSCRIPTION)
    for request, task in ((Request("a"), Task.EMBEDDING), (Request("a", transcribes=True), Task.GENERATION)):
        with pytest.raises(InvalidPayload, match=rf"^this server is for {task.value} \(option\.task\), on /v1/"):
            check_task(request, task)
    made = preprocessor(task=Task.EMBEDDING)
    head = made.read_head(Head())
    with pytest.raises(InvalidPayload, match="this request is for "):
        made.parse(made.decode(b'{"inputs": "a"}', head), head)


def test_a_host_that_cannot_stream_refuses_streams() -> None:
    body = json.dumps({"inputs": "a", "stream": True}).encode()
    made = preprocessor(whole=True)
    head = made.read_head(Head())
    with pytest.raises(InvalidPayload, match=r"^'stream' is not supported by DJL's dynamic batching; it requires"):
        made.parse(made.decode(body, head), head)
    assert preprocessor().parse(made.decode(body, head), head).streams


def test_the_template_of_a_tokenizer_is_the_contexts() -> None:
    made = preprocessor(config=Config(max_input_len=3))
    assert made.context.most_tokens is not None
    assert made.context.most_tokens() == made.encoder.max_tokens() == 1000
    assert made.context.chat_template == EchoTokenizer().chat_template


# -- routes ------------------------------------------------------------------------------------------------------


def test_routes_are_found_by_their_template_and_model() -> None:
    chat = ROUTES["/v1/chat/completions"]
    routes = InferenceRoutes(["m", "n"], {"/v1/chat/completions": chat, "/v2/models/{model}/infer": chat})
    for path in ("/invocations", "/predictions/m", "/predictions/n/1", "/models/m/invoke"):
        assert routes.dialect(path) is None
    for path in ("/v1/chat/completions", "/v1/chat/completions/", "/v2/models/n/infer"):
        assert routes.dialect(path) is chat
    for path in ("/predictions/other", "/predictions/m/2", "/v2/models/m/n/infer", "/nowhere"):
        with pytest.raises(InvalidPayload) as raised:
            routes.dialect(path)
        names = "/invocations, /predictions/m, /models/m/invoke, /v1/chat/completions, /v2/models/m/infer"
        assert raised.value.message == f"route={path} is not a route for inference; available routes: {names}"
    assert [routes.has(path) for path in ("/predictions/other", "/predictions/m/2", "/nowhere", "/models/m")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert routes.refusal("/" + "x" * 100).startswith("route=/" + "x" * 63 + " is not")
    assert routes.dialects.keys().isdisjoint(INVOKE)


# -- memory and threads of admission -----------------------------------------------------------------------------


def test_a_quarter_of_the_memory_is_left_to_small_requests() -> None:
    quota = memory_quota(Config(requests_total_bytes=1000 << 20))
    assert quota.most == 750 << 20
    quota.change(0, 750 << 20)
    quota.change(0, 1 << 20)
    with pytest.raises(ServingError, match=r"^all requests together need too much memory \(option\.requests_total_"):
        quota.change(0, (1 << 20) + 1)
    for _ in range(249):
        quota.change(0, 1 << 20)
    with pytest.raises(ServingError):
        quota.change(0, 1)


def test_a_count_has_those_within() -> None:
    count = Count()
    with count:
        with count:
            assert count.value == 2
        assert count.value == 1
    with pytest.raises(ZeroDivisionError), count:
        raise ZeroDivisionError
    assert count.value == 0


def test_the_memory_left_to_small_requests_is_documented() -> None:
    size = admission.SMALL / (1 + quota.BODY_MEMORY) / KIB
    assert not undocumented("wire/README.md", f"reserved for requests of up to {size:g} KiB")
