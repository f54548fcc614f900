"""Names that ask for isolation, safety or a constraint: every dialect obeys them, or refuses the request by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import ServingError
from handler.core.values import Request
from handler.protocols.kernel.body import _NEVER_IGNORED
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.llamacpp.tokenize import APPLY_TEMPLATE
from handler.protocols.llamacpp.tokenize import TOKENIZE as LLAMA_TOKENIZE
from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.tgi.native import CHAT_TOKENIZE
from handler.protocols.vllm.tokenize import DETOKENIZE, TOKENIZE, TOKENIZE_CHAT
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS, EXAMPLES
from tests.unit.protocols.test_parameters import context

SEEING = replace(CAPABLE, no_media={"image": "", "audio": ""}, chat_template="{{ messages }}")
SALTED = {"cache_salt": "tenant-1"}
SCHEMA = {"type": "object"}
ASKED: dict[str, Any] = {
    "cache_salt": "tenant-1", "extra_key": "tenant-1", "inference_geo": "us", "zdr": True, "watermarking": True,
    "guardrails": ["pii"], "guardrail_config": {"id": "x"}, "guardrailConfig": {"id": "x"},
    "amazon-bedrock-guardrailConfig": {"id": "x"}, "moderation": {"model": "x"}, "safe_prompt": True,
    "safety_mode": "STRICT", "safety_settings": [1], "safetySettings": [1],
    "regex": "[0-9]+", "ebnf": 'root ::= "x"', "json_schema": SCHEMA, "structural_tag": {"type": "x"},
    "grammar": {"type": "regex", "value": "[0-9]+"}, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "[0-9]+"}, "guided_json": SCHEMA, "guided_json_object": True,
    "guided_regex": "[0-9]+", "guided_choice": ["a"], "guided_grammar": 'root ::= "x"',
    "guided_decoding": {"json": "{}"},
}  # fmt: skip


TRITON = ("triton_generate", "triton_generate_stream", "triton_shape")
"""The dialects that refuse an object as Triton does."""


def parse(route: str, body: Any) -> list[Request] | str:
    """Return the requests to the engine, or the refusal."""
    try:
        return list(DIALECTS[route].parse(copy.deepcopy(body), SEEING).requests)
    except ServingError as error:
        return error.message


def obeys(requests: list[Request], name: str) -> bool:
    if name == "cache_salt":
        return {request.sampling.cache_salt for request in requests} == {"tenant-1"}
    return all(request.sampling.structured_output is not None for request in requests)


def test_each_name_is_asked_for() -> None:
    assert ASKED.keys() == _NEVER_IGNORED.keys()


@in_one_test(("route", "dialect"), EXAMPLES)
def test_it_is_obeyed_or_refused_by_name(route: str, dialect: str) -> None:
    example = DESCRIPTIONS[dialect].example
    assert isinstance(parse(route, example), list), "the example itself is good"
    if dialect in ("openai_transcriptions", "openai_translations"):  # whose `response_format` is that of the transcript
        names = ASKED.keys() - {"response_format"}
    else:
        names = {*ASKED}
    for name in names:
        found = parse(route, {**example, name: ASKED[name]})
        assert name in found if isinstance(found, str) else obeys(found, name), (name, found)
        deep = parse(route, {**example, "extra_body": {name: ASKED[name]}})
        wanted = "'extra_body'" if dialect in TRITON else f"extra_body.{name}"
        assert wanted in str(deep), (name, deep)


def has_parameters(dialect: str) -> bool:
    return "parameters" in DESCRIPTIONS[dialect].request_shape(SEEING)["properties"]


NESTED = [(route, dialect) for route, dialect in EXAMPLES if has_parameters(dialect)]


@in_one_test(("route", "dialect"), NESTED)
def test_under_parameters_too_in_never_ignored(route: str, dialect: str) -> None:
    example = DESCRIPTIONS[dialect].example
    for name, value in ASKED.items():
        found = parse(route, {**example, "parameters": {**example.get("parameters", {}), name: value}})
        assert name in found if isinstance(found, str) else obeys(found, name), (name, found)


def test_names_that_ask_for_nothing_are_not_refused() -> None:
    nothing = {"inference_geo": "global", "safety_mode": "OFF", "safe_prompt": False, "guardrails": [], "regex": None}
    for name in ("openai_chat", "anthropic_messages", "tgi_generate", "openai_embeddings", "tei_embed"):
        assert isinstance(parse(name, {**DESCRIPTIONS[name].example, **nothing}), list), name


@in_one_test("dialect", ["lmi", "lmi_async", "tgi_generate", "openai_embeddings", "tei_embed", "openai_chat"])
def test_a_neutral_format_and_keys_of_users_are_not_refused(dialect: str) -> None:
    example = DESCRIPTIONS[dialect].example
    for extra in (
        {"response_format": {"type": "text"}},
        {"metadata": {"grammar": "french"}},
        {"chat_template_kwargs": {"grammar": "x"}},
    ):
        if dialect != "openai_embeddings" or "response_format" in extra:  # it has its own fields of the other names
            assert isinstance(parse(dialect, {**example, **extra}), list), (dialect, extra)
        if dialect in ("lmi", "lmi_async", "tgi_generate"):
            assert isinstance(parse(dialect, {"inputs": "a", "parameters": extra}), list), (dialect, extra)


@in_one_test("carrier", ["extra_body", "nvext", "sampling_params"])
def test_objects_that_carry_parameters_are_searched(carrier: str) -> None:
    body = {**DESCRIPTIONS["openai_chat"].example, carrier: {"guided_regex": "a"}}
    assert f"{carrier}.guided_regex" in str(parse("openai_chat", body))


def test_no_allowed_token_is_refused() -> None:
    for dialect in ("openai_chat", "openai_completions"):
        found = parse(dialect, {**DESCRIPTIONS[dialect].example, "allowed_token_ids": []})
        assert str(found).startswith("allowed_token_ids=[]: must be"), found
    found = parse("lmi", {"inputs": "a", "parameters": {"allowed_token_ids": []}})
    assert "allowed_token_ids=[]: must be" in str(found)


MESSAGES = [{"role": "user", "content": "a"}]
COUNTED = [
    (TOKENIZE, {"prompt": "a"}),
    (LLAMA_TOKENIZE, {"content": "a"}),
    (DETOKENIZE, {"tokens": [0]}),
    *((schema, {"messages": MESSAGES}) for schema in (TOKENIZE_CHAT, APPLY_TEMPLATE, CHAT_TOKENIZE)),
]


@in_one_test(("schema", "body"), COUNTED)
def test_counts_of_tokens_ignore_them(schema: Dialect, body: dict[str, Any]) -> None:
    """Nothing is computed, so nothing needs isolation. Clients send a chat's own body to /tokenize."""
    for name, value in ASKED.items():
        parsed = schema.parse({**body, name: value}, SEEING)
        assert name in parsed.ignored or schema is CHAT_TOKENIZE, "it takes the body of a chat, whose names it knows"


@in_one_test("salt", ["", 7, ["a"], "a" * 129, "a@b", "a/b", "a\\b", "a\0b"])
def test_a_salt_has_vllms_limits(salt: Any) -> None:
    found = parse("openai_chat", {**DESCRIPTIONS["openai_chat"].example, "cache_salt": salt})
    assert str(found).startswith("cache_salt="), found


def test_a_prompt_that_only_fills_the_cache_keeps_its_salt() -> None:
    body = {**DESCRIPTIONS["anthropic_messages"].example, "max_tokens": 0, **SALTED}
    (request,) = DIALECTS["anthropic_messages"].parse(body, SEEING).requests
    assert (request.sampling.cache_salt, request.sampling.max_new_tokens) == ("tenant-1", 1)


@in_one_test("engine", ["echo", "openvino"])
def test_engines_without_a_divisible_cache_refuse_it(engine: str) -> None:
    able = replace(SEEING, engine=engine, unsupported=context(engine, {}).unsupported)
    for dialect in ("openai_chat", "openai_completions", "openai_responses", "anthropic_messages", "openai_embeddings"):
        with pytest.raises(ServingError, match=f"cache_salt=.tenant-1.: the engine {engine} does not support it"):
            DIALECTS[dialect].parse({**DESCRIPTIONS[dialect].example, **SALTED}, able)
