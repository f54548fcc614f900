"""Rules of System One and of OpenAI's decisions, which return the probability of each option of a question."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from proof.conform import sources
from proof.conform.dialects import Body
from proof.conform.exchange import Response
from proof.conform.rule import Source, expect, expect_fields, expect_refused, expect_response, expect_status, rule, skip
from proof.conform.server import Server

_rule = partial(rule, profiles=("decisions",))
_RESULTS = "answers"
_ROUNDED = 2e-3
"""Tolerance of numbers that are computed from probabilities, which some servers round to four decimal digits."""

_STATE = "The parcel arrived broken, and nobody has replied to my three letters."
_IMAGE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_REFUND, _TEAM, _ANGER = "Does the customer want a refund?", "Which team should read this?", "How angry is the author?"
_LEVELS = ("calm", "annoyed", "furious")


class DecisionApi(NamedTuple):
    """An API for decisions.

    Attributes:
        group: the group of the rules.
        body: a request with three questions, whose names are not in alphabetical order.
        fields: the fields of a result, by its type.
        refused: fields that replace those of `body`, and make the server refuse the request, by the ID of the rule.
        image: fields that add an image to the request.
    """

    group: str
    path: str
    source: Source
    body: Body
    fields: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, Body]
    image: Body

    async def ask(self, server: Server, *, path: str = "", **fields: Any) -> Response:
        """Send the request with other fields. The value None omits a field.

        Raises:
            NotAsked: the server does not have the route of the API.
        """
        values = {**self.body, "model": await server.model(), **fields}
        body = {name: value for name, value in values.items() if value is not None}
        response = await server.post(path or self.path, body)
        if response.status == 404 and (await server.get(self.path)).status == 404:
            skip(f"the server has no {self.path}")
        return response


SYSTEMONE = DecisionApi(
    "systemone",
    "/v1/systemone",
    sources.SYSTEMONE,
    {
        "state": {"text": _STATE},
        "questions": {
            "refund": {"type": "noul", "instructions": _REFUND},
            "area": {"type": "choice", "instructions": _TEAM, "criteria": {"sales": None, "support": "Broken parcels"}},
            "anger": {"type": "score", "instructions": _ANGER, "criteria": _LEVELS},
        },
    },
    {
        "noul": ("type", "noul"),
        "choice": ("type", "choice", "probabilities", "confidence"),
        "score": ("type", "score", "legend", "probabilities", "confidence"),
    },
    {
        "unknown-type": {"questions": {"q": {"type": "essay", "instructions": _REFUND}}},
        "no-options": {"questions": {"q": {"type": "choice", "instructions": _TEAM, "criteria": {}}}},
        "no-questions": {"questions": {}},
        "no-state": {"state": None},
        "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    },
    {"images": [_IMAGE]},
)
OPENAI = DecisionApi(
    "decisions",
    "/v1/decisions",
    sources.OPENAI_DECISIONS,
    {
        "input": _STATE,
        "questions": [
            {"type": "predicate", "name": "refund", "instructions": _REFUND},
            {
                "type": "choice",
                "name": "area",
                "instructions": _TEAM,
                "choices": [{"value": "sales"}, {"value": "support", "description": "Broken parcels"}],
            },
            {
                "type": "score",
                "name": "anger",
                "instructions": _ANGER,
                "levels": [{"label": level} for level in _LEVELS],
            },
        ],
    },
    {
        "predicate": ("type", "name", "probability"),
        "choice": ("type", "name", "choice", "probabilities", "confidence"),
        "score": ("type", "name", "score", "probabilities", "confidence"),
    },
    {
        "unknown-type": {"questions": [{"type": "essay", "name": "q", "instructions": _REFUND}]},
        "no-options": {"questions": [{"type": "choice", "name": "q", "instructions": _TEAM, "choices": []}]},
        "no-questions": {"questions": []},
        "no-state": {"input": None},
        "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    },
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": _IMAGE}]}]},
)


async def _decide(api: DecisionApi, server: Server) -> tuple[Response, list[tuple[str, dict[str, Any]]]]:
    """Return the response to the request of an API, and the name and the result of each question in their order."""
    response = expect_response(await api.ask(server))
    return response, _by_name(response)


def _by_name(response: Response) -> list[tuple[str, dict[str, Any]]]:
    results = response.object[_RESULTS]
    return [*results.items()] if isinstance(results, dict) else [(result["name"], result) for result in results]


def _probabilities(result: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """Return each option of a result with its probability. True and false have no list."""
    listed = result.get("probabilities", {})
    if isinstance(listed, list):
        return [(item["value"], item["probability"]) for item in listed]
    return [*listed.items()] if result["type"] != "noul" else []


# -- results -----------------------------------------------------------------------------------------------------------


async def _result(api: DecisionApi, server: Server) -> None:
    response, results = await _decide(api, server)
    expect_fields(response, response.object, "model", _RESULTS, "usage")
    expect(isinstance(response.object["model"], str), "the name of the model", response)
    for kind, (_, result) in zip(api.fields, results, strict=False):
        expect_fields(response, result, *api.fields[kind])
        expect(result["type"] == kind, f"a result of the type {kind}", response)


async def _order(api: DecisionApi, server: Server) -> None:
    response, results = await _decide(api, server)
    expect([name for name, _ in results] == ["refund", "area", "anger"], "refund, area and anger", response)


async def _sums(api: DecisionApi, server: Server) -> None:
    response, results = await _decide(api, server)
    for kind, number, (_, result) in zip(api.fields, (0, 2, 3), results, strict=True):
        values = [value for _, value in _probabilities(result)] if number else [result[api.fields[kind][-1]]]
        expect(all(0 <= value <= 1 for value in values), "probabilities between 0 and 1", response)
        is_whole = not number or (len(values) == number and abs(math.fsum(values) - 1) <= _ROUNDED)
        expect(is_whole, f"{number} probabilities whose sum is 1", response)


async def _mass(api: DecisionApi, server: Server) -> None:
    response, _ = await _decide(api, server)
    for mass in _members(response.value, "label_mass"):
        expect(isinstance(mass, int | float) and 0 <= mass <= 1, "a label_mass between 0 and 1", response)


def _members(value: Any, name: str) -> Iterator[Any]:
    """Yield the values of all members with this name."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _members(part, name)
    if isinstance(value, dict) and name in value:
        yield value[name]


async def _model(api: DecisionApi, server: Server) -> None:
    response, _ = await _decide(api, server)
    name = await server.model()
    expect(response.object.get("model") == name, f"the model {name}", response)


async def _ids(api: DecisionApi, server: Server) -> None:
    first, _ = await _decide(api, server)
    second, _ = await _decide(api, server)
    for name in ("id", "x-request-id"):
        ids = [{**response.headers, **response.object}.get(name) for response in (first, second)]
        expect(ids[0] is None or ids[0] != ids[1], f"another {name} than that of the response before", second)


async def _best(api: DecisionApi, server: Server) -> None:
    response, results = await _decide(api, server)
    (_, choice), (_, score) = results[1:]
    options = dict(_probabilities(choice))
    expect(options[choice["choice"]] == max(options.values()), "the most likely option as choice", response)
    expected = math.fsum(index * value for index, (_, value) in enumerate(_probabilities(score)))
    expect(abs(score["score"] - expected) <= _ROUNDED, f"the score {expected:.4f}", response)


async def _range(api: DecisionApi, server: Server) -> None:
    response, results = await _decide(api, server)
    for _, result in results[1:]:
        expect(0 <= result["confidence"] <= 1, "a confidence between 0 and 1", response)


async def _repeated(api: DecisionApi, server: Server) -> None:
    """Ask the same on /invocations, where requests of SageMaker have no model."""
    _, results = await _decide(api, server)
    response = expect_response(await api.ask(server, path="/invocations", model=None))
    same = [(name, [*result]) for name, result in _by_name(response)] == [(name, [*result]) for name, result in results]
    expect(same, f"the results of {api.path}", response)


async def _compressed(api: DecisionApi, server: Server) -> None:
    await _decide(api, server)
    data = json.dumps({**api.body, "model": await server.model()}).encode()
    for coding, encode in (("gzip", gzip.compress), ("zstd", _zstd)):
        expect_response(await server.post(api.path, encode(data), headers={"content-encoding": coding}))


def _zstd(data: bytes) -> bytes:
    """Return a zstd frame (RFC 8878) with a raw block of 256 to 65,791 bytes."""
    size = (len(data) - 256).to_bytes(2, "little")
    return b"\x28\xb5\x2f\xfd\x60" + size + (len(data) << 3 | 1).to_bytes(3, "little") + data


async def _sees(api: DecisionApi, server: Server) -> None:
    response = await api.ask(server, **api.image)
    expect(response.ok or response.refused, "status 200, or 400 to 499 from a model without images", response)


async def _refuses(api: DecisionApi, name: str, server: Server) -> None:
    expect_refused(await api.ask(server, **api.refused[name]))


_VLLM_ROUTE = "vLLM 0.33 does not read it on /invocations."
_VLLM_BODY = "vLLM 0.33 does not decompress bodies."
_SHARED: Mapping[str, tuple[str, Callable[[DecisionApi, Server], Awaitable[None]], str]] = {
    "result": ("A response has model and usage, and results with the fields of their types.", _result, ""),
    "order": ("Results have the order of their questions.", _order, ""),
    "probabilities": ("Probabilities are between 0 and 1, and their sum is 1.", _sums, ""),
    "mass": ("A label_mass is between 0 and 1.", _mass, ""),
    "names-model": ("A response names the model of its request.", _model, ""),
    "ids": ("A response that has an id has an id of its own.", _ids, ""),
    "best": ("The choice is the most likely option, and the score is the expected level.", _best, ""),
    "confidence": ("A confidence is between 0 and 1.", _range, ""),
    "image": ("An image is read or refused, but not with 501, which SDKs send again.", _sees, "llama.cpp sends 501."),
    "invocations": ("/invocations reads the same body without a model.", _repeated, _VLLM_ROUTE),
    "compressed": ("Bodies compressed with gzip or zstd are read.", _compressed, _VLLM_BODY),
}
"""Maps the name of a rule of both APIs to its sentence, its check, and a documented difference."""

_REFUSED: Mapping[str, str] = {
    "unknown-type": "A question of an unknown type is refused, but not with 501, which SDKs send again.",
    "no-options": "A choice without options is refused.",
    "no-questions": "A request without questions is refused.",
    "no-state": "A request without a text for the questions is refused.",
    "thinking": "A request that switches thinking on is refused.",
}
"""Maps the name of a rule of both APIs about an invalid request to its sentence."""


def _add(api: DecisionApi) -> None:
    for name, (sentence, check, differs) in _SHARED.items():
        _rule(f"{api.group}.{name}", sentence, api.source, differs=differs)(partial(check, api))
    for name, sentence in _REFUSED.items():
        _rule(f"{api.group}.{name}", sentence, api.source)(partial(_refuses, api, name))


# -- System One --------------------------------------------------------------------------------------------------------


_add(SYSTEMONE)


def _certainty(probabilities: list[float], *, ordered: bool) -> float:
    """Return the confidence of a choice, or of a score, whose options are ordered."""
    number, best = len(probabilities), probabilities.index(max(probabilities))
    if not ordered:
        return (number * probabilities[best] - 1) / (number - 1)
    spread = math.fsum(abs(index - (number - 1) / 2) for index in range(number)) / number
    distance = math.fsum(value * abs(index - best) for index, value in enumerate(probabilities))
    return max(0.0, 1 - distance / spread)


@_rule(
    "systemone.formula",
    "The confidence follows TypeSafe's formulas.",
    sources.CONFIDENCE,
    differs="vLLM 0.33 multiplies the probability by label_mass; Ollama uses the entropy.",
)
async def formula(server: Server) -> None:
    response, results = await _decide(SYSTEMONE, server)
    for _, result in results[1:]:
        values = [value for _, value in _probabilities(result)]
        expected = _certainty(values, ordered=result["type"] == "score")
        expect(abs(result["confidence"] - expected) <= _ROUNDED, f"the confidence {expected:.4f}", response)


@_rule(
    "systemone.legend", "The keys of the legend and probabilities of a score are 0, 1, and so on.", sources.SYSTEMONE
)
async def legend(server: Server) -> None:
    response, results = await _decide(SYSTEMONE, server)
    levels = {str(index): level for index, level in enumerate(_LEVELS)}
    score = results[-1][1]
    expect(score["legend"] == levels and score["probabilities"].keys() == levels.keys(), f"{levels}", response)


@_rule("systemone.usage", "usage has the integers input_tokens and output_tokens.", sources.SYSTEMONE)
async def usage(server: Server) -> None:
    response, _ = await _decide(SYSTEMONE, server)
    match response.object["usage"]:
        case {"input_tokens": int(read), "output_tokens": int()} if read > 0:
            return
    expect(False, "input_tokens above 0, and output_tokens", response)


@_rule(
    "systemone.error",
    "An invalid question gets 422, and detail whose loc names the question.",
    sources.SYSTEMONE,
    differs="vLLM 0.33 and llama.cpp send 400 with OpenAI's error.",
)
async def error(server: Server) -> None:
    response = await SYSTEMONE.ask(server, **SYSTEMONE.refused["unknown-type"])
    expect_status(response, 422)
    match response.value:
        case {"detail": [{"loc": ["body", "questions", "q", *_], "msg": str(), "type": str()}, *_]}:
            return
    expect(False, 'a detail with the loc ["body", "questions", "q"], msg and type', response)


@_rule(
    "systemone.model",
    "The model jev-latest, which TypeSafe's SDK sends by default, is served, and so is a request without a model.",
    sources.SYSTEMONE,
    differs="vLLM 0.33 sends 404 for the name; --served-model-name adds it.",
)
async def default_model(server: Server) -> None:
    for name in (None, "jev-latest"):
        expect_response(await SYSTEMONE.ask(server, model=name))


@_rule(
    "systemone.request-id",
    "A response has the header x-typesafe-request-id, which the SDK's request_id reads.",
    sources.SYSTEMONE,
    differs="vLLM 0.33 does not send it.",
)
async def request_id(server: Server) -> None:
    seen = {""}
    for _ in range(2):
        response, _ = await _decide(SYSTEMONE, server)
        id = response.headers.get("x-typesafe-request-id", "")
        expect(id not in seen, "x-typesafe-request-id, with another id than before", response)
        seen.add(id)


@_rule(
    "systemone.models",
    "GET /v1/models has models with name, description and release_date.",
    sources.SYSTEMONE,
    differs="vLLM 0.33 has only OpenAI's list.",
)
async def models(server: Server) -> None:
    response = expect_response(await server.get("/v1/models"))
    expect_fields(response, response.object["models"][0], "name", "description", "release_date")


# -- OpenAI's decisions ------------------------------------------------------------------------------------------------


_add(OPENAI)


@_rule(
    "decisions.usage", "total_tokens is input_tokens plus output_tokens, with both details.", sources.OPENAI_DECISIONS
)
async def openai_usage(server: Server) -> None:
    response, _ = await _decide(OPENAI, server)
    match response.object["usage"]:
        case {
            "input_tokens": int(read),
            "input_tokens_details": {"cached_tokens": int(), "cache_write_tokens": int()},
            "output_tokens": int(written),
            "output_tokens_details": {"reasoning_tokens": int()},
            "total_tokens": int(total),
        } if read > 0 and read + written == total:
            return
    expect(False, "input_tokens + output_tokens = total_tokens, and the details of both", response)


@_rule("decisions.levels", "The probabilities of a score name each level, with its index.", sources.OPENAI_DECISIONS)
async def levels(server: Server) -> None:
    response, results = await _decide(OPENAI, server)
    listed = [(item["value"], item["label"]) for item in results[-1][1]["probabilities"]]
    expect(listed == [*enumerate(_LEVELS)], f"the values and labels {[*enumerate(_LEVELS)]}", response)


@_rule("decisions.error", "An error has message, type, param and code.", sources.OPENAI_ERRORS)
async def openai_error(server: Server) -> None:
    response = await OPENAI.ask(server, **OPENAI.refused["unknown-type"])
    expect_status(response, 400)
    expect_fields(response, response.object.get("error"), "message", "type", "param", "code")


@_rule("decisions.values", 'The values true and "true" are different choices.', sources.OPENAI_DECISIONS)
async def values(server: Server) -> None:
    choices = [{"value": True}, {"value": "true"}]
    questions = [{"type": "choice", "name": "q", "instructions": _TEAM, "choices": choices}]
    response = expect_response(await OPENAI.ask(server, questions=questions))
    listed = [repr(value) for value, _ in _probabilities(response.object[_RESULTS][0])]
    expect(listed == ["True", "'true'"], 'the values true and "true"', response)


@_rule("decisions.unnamed", "The result of a question without a name has the name null.", sources.OPENAI_DECISIONS)
async def unnamed(server: Server) -> None:
    response = expect_response(await OPENAI.ask(server, questions=[{"type": "predicate", "instructions": _REFUND}]))
    expect(response.object[_RESULTS][0].get("name", "") is None, "the name null", response)


@_rule(
    "decisions.json",
    "A message may have the parts input_text and input_json.",
    sources.OPENAI_DECISIONS,
    differs="vLLM 0.33 refuses input_json.",
)
async def parts(server: Server) -> None:
    content = [{"type": "input_text", "text": _STATE}, {"type": "input_json", "data": {"parcel": 7}}]
    expect_response(await OPENAI.ask(server, input=[{"role": "user", "content": content}]))
