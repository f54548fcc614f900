"""Mutants for each rule: a function that changes one answer of the scripted server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from tests.moving.conform.wire import HEADER, Reply, Request

Mutate = Callable[[Request, Reply], None]
MUTANTS: dict[str, Mutate] = {}
"""By the rule that it breaks; rules in ELSEWHERE are broken by what the server does, not by an answer."""

ELSEWHERE = (
    *("ping.in-time", "ping.connection", "invocations.headers", "limits.at-once", "metrics.count", "key.every-route"),
    *("key.right", "disconnect.stream", "disconnect.whole", "bad.alone", "sessions.use", "sessions.closed"),
    *("sessions.unknown", "adapters.unknown", "adapters.use", "adapters.delete", "anthropic.version"),
    *("bidirectional.ping", "bidirectional.utf-8"),
    *("start.ready", "start.early", "stop.finishes", "stop.new-work", "stop.exit"),
)


def at(path: str, change: Callable[[Reply], object], *, method: str = "") -> Mutate:
    """Change what is answered on a path."""

    def mutate(request: Request, reply: Reply) -> None:
        if request.path == path and request.method == (method or request.method):
            change(reply)

    return mutate


def having(part: bytes, change: Callable[[Reply], object]) -> Mutate:
    """Change what is answered to a body that has this part."""

    def mutate(request: Request, reply: Reply) -> None:
        if part in request.body:
            change(reply)

    return mutate


def status(number: int) -> Callable[[Reply], object]:
    def change(reply: Reply) -> None:
        reply.status = number

    return change


def whole(change: Callable[[Any], object]) -> Mutate:
    """Change the value of whole answers that the engine makes."""

    def mutate(request: Request, reply: Reply) -> None:
        if reply.made and reply.events is None:
            change(reply.value)

    return mutate


def events(change: Callable[[list[Any]], object]) -> Mutate:
    """Change a stream's events."""

    def mutate(request: Request, reply: Reply) -> None:
        if reply.made and reply.events:
            change(reply.events)

    return mutate


def streams(change: Callable[[Reply], object]) -> Mutate:
    """Change streams."""

    def mutate(request: Request, reply: Reply) -> None:
        if reply.made and reply.events:
            change(reply)

    return mutate


def refusals(change: Callable[[Reply], object]) -> Mutate:
    def mutate(request: Request, reply: Reply) -> None:
        if reply.status >= 400:
            change(reply)

    return mutate


def all_of(*mutations: Mutate) -> Mutate:
    """Make several changes."""

    def mutate(request: Request, reply: Reply) -> None:
        for mutation in mutations:
            mutation(request, reply)

    return mutate


def field(name: str, value: Any) -> Callable[[Reply], object]:
    """Set a field of a reply."""
    return lambda reply: setattr(reply, name, value)


def header(name: str, value: str = "1") -> Callable[[Reply], object]:
    return lambda reply: reply.headers.update({name: value})


def put(*keys: Any, to: Any) -> Callable[[Any], object]:
    """Set the value where `keys` lead; does nothing where they lead nowhere."""

    def change(value: Any) -> None:
        try:
            for key in keys[:-1]:
                value = value[key]
            value[keys[-1]] = to
        except (KeyError, IndexError, TypeError):
            pass

    return change


def drop(*keys: Any) -> Callable[[Any], object]:
    """Drop the value where `keys` lead; does nothing where they lead nowhere."""

    def change(value: Any) -> None:
        try:
            for key in keys[:-1]:
                value = value[key]
            del value[keys[-1]]
        except (KeyError, IndexError, TypeError):
            pass

    return change


def _to_bytes(reply: Reply, change: Callable[[bytes], bytes]) -> None:
    assert reply.events is not None
    reply.events = [change(reply.encode(event)) for event in reply.events]


def _without_length(request: Request, reply: Reply) -> None:
    if reply.made and reply.events is None:
        reply.headers["no-length"] = "1"


def _slow(request: Request, reply: Reply) -> None:
    if reply.made == 64 and reply.events is None:
        reply.made = 400


def _cut_late(request: Request, reply: Reply) -> None:
    """Cut a stream, but not one of 64 tokens: it shows the speed, which a busy machine lowers."""
    if reply.events and len(reply.events) > 16 and len(reply.events) != 64:
        reply.events = reply.events[: len(reply.events) // 2]
        reply.headers["cut"] = "1"


def _one_event(request: Request, reply: Reply) -> None:
    if reply.made and reply.events:
        text = "".join(event["token"]["text"] for event in reply.events)
        reply.events[:-1] = []
        reply.events[0]["token"]["text"] = text


def _no_key_for_ping(request: Request, reply: Reply) -> None:
    if request.path == "/ping" and "authorization" not in request.headers:
        reply.status = 401


def _no_model(request: Request, reply: Reply) -> None:
    if request.path == "/v1/chat/completions" and b'"model": "model"' not in request.body:
        reply.status = 400


def _too_large(request: Request, reply: Reply) -> None:
    if len(request.body) > 200_000:
        reply.status = 413


def _no_prompt(request: Request, reply: Reply) -> None:
    if request.method == "POST" and request.body.startswith(b'{"parameters"'):
        reply.status = 500


def _refused_as_lmi(reply: Reply) -> None:
    if reply.status == 422:
        reply.status = 424


def _by_default_20(request: Request, reply: Reply) -> None:
    if b"max_new_tokens" not in request.body:
        put("details", "generated_tokens", to=20)(reply.value)


def _empty(request: Request, reply: Reply) -> None:
    if request.method == "POST" and not request.body:
        reply.status = 500


def _long(request: Request, reply: Reply) -> None:
    if len(request.body) > 1_000_000:
        reply.status = 200


def _stop_goes_on(request: Request, reply: Reply) -> None:
    """The text goes on after the stop sequence, by eight words."""
    if b'"stop' in request.body and reply.events is None and reply.made:
        text = json.loads(json.dumps(reply.value))
        put("generated_text", to="one two three four five six seven eight")(text)
        put("choices", 0, "message", "content", to="one two three four five six")(text)
        put("stop_sequence", to=None)(text)
        reply.value = text


def _not_an_array(request: Request, reply: Reply) -> None:
    if request.path in ("/", "/invocations") and isinstance(reply.value, list):
        reply.value = reply.value[0]


def _root_never_streams(request: Request, reply: Reply) -> None:
    if request.path == "/" and reply.events:
        reply.events, reply.value, reply.content_type = None, [{"generated_text": "x"}], "application/json"


def _index_from_0(found: list[Any]) -> None:
    for index, event in enumerate(found):
        event["index"] = index


def _each(*keys: Any, to: Any) -> Callable[[list[Any]], object]:
    return lambda found: [put(*keys, to=to)(event) for event in found]


def _usage_with_choices(request: Request, reply: Reply) -> None:
    if b"include_usage" in request.body and reply.events:
        reply.events[-1]["choices"] = [{"index": 0, "delta": {}, "finish_reason": None}]


def _many_series(reply: Reply) -> None:
    reply.value += b"".join(b'many{n="%d"} 1\n' % number for number in range(3000))


def _no_such(request: Request, reply: Reply) -> None:
    if b"no-such-model" in request.body:
        reply.status = 200


def _without_expiry(reply: Reply) -> None:
    """In the header of SageMaker's sessions, and in that of LMI's."""
    for name in ("X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Session-Id"):
        reply.headers[name] = "an-id-alone"


def _metric_names(reply: Reply) -> None:
    reply.value = reply.value.replace(b"tgi_", b"our_")


_TOKENS = itertools.count(100)
_TEXT = b'"type": "text"'
_FULL = b'"return_full_text": true'
_INFER = "/v2/models/model/infer"

MUTANTS |= {
    "ping.ready": at("/ping", status(500)),
    "invocations.answers": at("/invocations", status(500)),
    "invocations.method": at("/invocations", status(200), method="GET"),
    "invocations.whole-length": _without_length,
    "openai-route.stream": at("/v1/chat/completions", field("content_type", "application/jsonlines")),
    "openai-route.model": _no_model,
    "limits.whole-answer": _slow,
    "limits.long-stream": _cut_late,
    "limits.payload": _too_large,
    "metrics.format": at("/metrics", lambda reply: setattr(reply, "value", reply.value + b"a line of none{\n")),
    "metrics.few": at("/metrics", _many_series),
    "key.ping": _no_key_for_ping,
    "stream.token-by-token": streams(header("held")),
    "stream.one-a-token": _one_event,
    "stream.chunked": streams(header("whole")),
    "stream.content-type": streams(field("content_type", "text/html")),
    "stream.clean-end": streams(header("cut")),
    "stream.same-text": events(put(0, "token", "text", to=" another")),
    "stream.characters": streams(lambda reply: _to_bytes(reply, lambda data: data.replace("日".encode(), b"\xe6\x97"))),
    "repeat.computed": at("/tokenize", lambda reply: put(0, "id", to=next(_TOKENS))(reply.value)),
    "stream.refused-before": having(b'"stream": true', status(200)),
    "bad.not-json": having(b'"messages": [', status(500)),
    "bad.empty": _empty,
    "bad.not-an-object": having(b"[1, 2, 3]", status(500)),
    "bad.utf-8": having(b"\xff\xfe", status(200)),
    "bad.surrogate": having(b"\\ud800", status(500)),
    "bad.deep": having(b'{"a":{"a":', status(500)),
    "bad.no-prompt": _no_prompt,
    "bad.prompt-type": having(b'"inputs": 7', status(500)),
    "bad.parameter-type": having(b'"many"', status(500)),
    "bad.parameter-range": having(b'"max_new_tokens": -1', status(200)),
    "bad.parameter-huge": having(b"0" * 30, status(500)),
    "bad.too-long": _long,
    "bad.told": having(b'"many"', field("value", b"")),
    "sessions.open": having(b"NEW_SESSION", _without_expiry),
    "sessions.close": having(b"CLOSE", field("headers", {})),
    "adapters.register": at("/adapters", status(500), method="POST"),
    "adapters.delete-unknown": at("/adapters/conform-has-no-such-adapter", status(200), method="DELETE"),
    "lmi.whole": whole(put("id", to=1)),
    "lmi.details": whole(drop("details", "inputs")),
    "lmi.async-details": whole(drop("details", "prefill")),
    "lmi.tokens": all_of(*(whole(drop("details", "tokens", 0, name)) for name in ("log_prob", "logprob"))),
    "lmi.generated-tokens": whole(put("details", "generated_tokens", to=7)),
    "lmi.finish-reason": all_of(
        whole(put("details", "finish_reason", to="max_tokens")),
        events(put(-1, "details", "finish_reason", to="max_tokens")),
    ),
    "lmi.default-length": _by_default_20,
    "lmi.full-text": having(_FULL, lambda reply: put("generated_text", to="x")(reply.value)),
    "lmi.line": events(put(0, "index", to=0)),
    "lmi.async-line": events(drop(0, "details")),
    "lmi.last-line": events(drop(-1, "generated_text")),
    "lmi.last-details": events(drop(-1, "details")),
    "lmi.blank-lines": streams(field("tail", b"")),
    "lmi.sse": streams(field("content_type", "application/jsonlines")),
    "lmi.error": refusals(status(400)),
    "lmi.inputs-list": having(b'"inputs": [', status(200)),
    "lmi.stop": _stop_goes_on,
    "lmi.chat": whole(put("object", to="chat")),
    "lmi.chat-lines": streams(field("content_type", "text/event-stream")),
    "lmi.completion": whole(put("object", to="completion")),
    "lmi.model-name": _no_such,
    "lmi.request-id": lambda request, reply: reply.headers.update({"x-request-id": ""}),
    "lmi.unknown-path": refusals(lambda reply: drop("type")(reply.value)),
    "tgi.generate": whole(put("id", to=1)),
    "tgi.root": _not_an_array,
    "tgi.root-stream": _root_never_streams,
    "tgi.invocations": at("/invocations", lambda reply: put(0, "details", to={})(reply.value)),
    "tgi.invocations-refusal": at("/invocations", _refused_as_lmi),
    "tgi.invocations-chat": at("/invocations", field("content_type", "application/jsonlines")),
    "tgi.chat-model": at("/invocations", lambda reply: put("model", to="tgi")(reply.value)),
    "tgi.details": whole(drop("details", "prefill")),
    "tgi.tokens": whole(drop("details", "tokens", 0, "special")),
    "tgi.finish-reason": whole(put("details", "finish_reason", to="stop")),
    "tgi.seed": whole(put("details", "seed", to=1)),
    "tgi.events": events(drop(0, "details")),
    "tgi.index": events(_index_from_0),
    "tgi.nulls": events(put(0, "generated_text", to="")),
    "tgi.last-event": events(put(-1, "generated_text", to="x")),
    "tgi.no-done": streams(field("tail", b"data: [DONE]\n\n")),
    "tgi.validation": refusals(status(400)),
    "tgi.stream-validation": at("/generate_stream", lambda reply: drop(0, "error_type")(reply.events)),
    "tgi.stop": having(b'"stop"', lambda reply: put("generated_text", to="one two")(reply.value)),
    "tgi.full-text": having(_FULL, lambda reply: put("generated_text", to="x")(reply.value)),
    "tgi.info": at("/info", lambda reply: drop("sha")(reply.value)),
    "tgi.health": at("/health", status(503)),
    "tgi.tokenize": at("/tokenize", lambda reply: drop(0, "start")(reply.value)),
    "tgi.headers": lambda request, reply: reply.headers.clear(),
    "tgi.metrics": at("/metrics", _metric_names),
    "tgi.chat": whole(put("object", to="chat")),
    "openai.models": at("/v1/models", lambda reply: drop("data", 0, "created")(reply.value)),
    "openai.chat": whole(drop("choices", 0, "message", "role")),
    "openai.ids": whole(put("id", to="chatcmpl-1")),
    "openai.model": whole(put("model", to="another")),
    "openai.usage": whole(put("usage", "total_tokens", to=1)),
    "openai.finish-reason": whole(put("choices", 0, "finish_reason", to="stop")),
    "openai.max-completion-tokens": having(
        b"max_completion_tokens", lambda reply: put("usage", "completion_tokens", to=9)(reply.value)
    ),
    "openai.chunks": events(put(1, "id", to="id-2")),
    "openai.role": events(drop(0, "choices", 0, "delta", "role")),
    "openai.done": streams(field("tail", b"")),
    "openai.last-chunk": events(put(0, "choices", 0, "finish_reason", to="stop")),
    "openai.stream-usage": _usage_with_choices,
    "openai.no-usage": events(_each("usage", to={"total_tokens": 1})),
    "openai.error": refusals(field("value", {"error": "words alone"})),
    "openai.error-status": refusals(status(422)),
    "openai.unknown-model": refusals(status(400)),
    "openai.stop": _stop_goes_on,
    "openai.content-parts": having(_TEXT, status(400)),
    "openai.completion": whole(put("object", to="completion")),
    "openai.completion-stream": streams(field("tail", b"")),
    "openai.completion-echo": whole(put("choices", 0, "text", to="x")),
    "anthropic.message": whole(drop("stop_sequence")),
    "anthropic.ids": whole(put("id", to="msg_1")),
    "anthropic.model": whole(put("model", to="another")),
    "anthropic.usage": whole(drop("usage", "output_tokens")),
    "anthropic.stop-reason": whole(put("stop_reason", to="end_turn")),
    "anthropic.max-tokens": refusals(status(200)),
    "anthropic.order": events(lambda found: found.pop()),
    "anthropic.event-names": streams(lambda reply: _to_bytes(reply, lambda data: data.partition(b"\n")[2])),
    "anthropic.start": events(put(0, "message", "content", to=[{}])),
    "anthropic.end": events(drop(-2, "usage")),
    "anthropic.error": refusals(lambda reply: drop("type")(reply.value)),
    "anthropic.stop": _stop_goes_on,
    "anthropic.system": having(b'"system"', status(400)),
    "anthropic.blocks": having(_TEXT, status(400)),
    "anthropic.count": at("/v1/messages/count_tokens", lambda reply: put("input_tokens", to="8")(reply.value)),
    "triton.live": at("/v2/health/live", status(503)),
    "triton.ready": at("/v2/models/conform-has-no-such-model/ready", status(200)),
    "triton.metadata": at("/v2/models/model", lambda reply: drop("inputs")(reply.value)),
    "triton.server": at("/v2", lambda reply: drop("extensions")(reply.value)),
    "triton.generate": whole(put("model_version", to=1)),
    "triton.id": whole(put("id", to="")),
    "triton.stream": events(drop(0, "model_version")),
    "triton.parameters": having(b'"parameters"', status(400)),
    "triton.nested": having(b'{"a": 1}', status(200)),
    "triton.error": refusals(lambda reply: put("error", to={})(reply.value)),
    "triton.unknown-model": refusals(status(500)),
    "triton.method": refusals(status(404)),
    "triton.datatypes": at("/v2/models/model", lambda reply: put("inputs", 0, "datatype", to="STRING")(reply.value)),
    "triton.infer": at(_INFER, lambda reply: put("outputs", 0, "shape", to=[1, 2])(reply.value)),
    "triton.infer-id": at(_INFER, lambda reply: drop("id")(reply.value)),
    "triton.infer-outputs": at(_INFER, lambda reply: put("outputs", 0, "name", to="x")(reply.value)),
    "triton.binary": at(_INFER, header(HEADER)),
    "triton.binary-header": refusals(status(500)),
    "triton.unknown-input": refusals(status(500)),
    "triton.wrong-datatype": refusals(status(500)),
}


# -- decisions ---------------------------------------------------------------------------------------------------------


def results(*keys: Any, to: Any = None) -> Mutate:
    """Set a field of a question's result, or drop it, in both APIs."""

    def mutate(request: Request, reply: Reply) -> None:
        if isinstance(reply.value, dict) and "answers" in reply.value:
            (drop if to is None else lambda *path: put(*path, to=to))("answers", *keys)(reply.value)

    return mutate


def decided(change: Callable[[Any], object]) -> Mutate:
    """Change the document of a decision."""

    def mutate(request: Request, reply: Reply) -> None:
        if isinstance(reply.value, dict) and "answers" in reply.value:
            change(reply.value)

    return mutate


def _in_reverse(value: Any) -> None:
    listed = value["answers"]
    value["answers"] = dict(reversed(listed.items())) if isinstance(listed, dict) else listed[::-1]


def _of_sagemaker_only_chats(request: Request, reply: Reply) -> None:
    if request.path == "/invocations":
        reply.status = 400


def _never_zstd(request: Request, reply: Reply) -> None:
    if request.headers.get("content-encoding") == "zstd":
        reply.status = 415


def _never_default(request: Request, reply: Reply) -> None:
    if b"jev-latest" in request.body:
        reply.status = 404


def _no_request_id(request: Request, reply: Reply) -> None:
    reply.headers.pop("x-typesafe-request-id", None)


_ESSAY, _THINKING = having(b'"essay"', status(501)), having(b"enable_thinking", status(200))
_IMAGE = having(b"data:image/png", status(501))
_WITHOUT_OPTIONS = (having(b'"criteria": {}', status(200)), having(b'"choices": []', status(200)))
_ALL = {
    "order": decided(_in_reverse),
    "invocations": _of_sagemaker_only_chats,
    "compressed": _never_zstd,
    "image": _IMAGE,
    "names-model": decided(put("model", to="another")),
    "ids": decided(put("id", to="decision-1")),
    "unknown-type": _ESSAY,
    "thinking": _THINKING,
    "no-options": all_of(*_WITHOUT_OPTIONS),
    "no-questions": all_of(having(b'"questions": {}', status(200)), having(b'"questions": []', status(200))),
    "no-state": refusals(status(200)),
}
MUTANTS |= {f"{group}.{name}": mutate for group in ("systemone", "decisions") for name, mutate in _ALL.items()}
MUTANTS |= {
    "systemone.result": results("anger", "legend"),
    "systemone.mass": decided(put("diagnostics", "area", "label_mass", to=7.0)),
    "decisions.mass": decided(put("diagnostics", 1, "label_mass", to=-0.1)),
    "systemone.probabilities": results("refund", "noul", to=1.0000000002),
    "systemone.best": results("area", "choice", to="sales"),
    "systemone.confidence": results("area", "confidence", to=1.01),
    "systemone.formula": results("area", "confidence", to=0.5),
    "systemone.legend": results("anger", "legend", to={"0": "calm"}),
    "systemone.usage": decided(put("usage", "output_tokens", to=1.0)),
    "systemone.error": refusals(status(400)),
    "systemone.model": _never_default,
    "systemone.request-id": _no_request_id,
    "systemone.models": at("/v1/models", lambda reply: drop("models", 0, "description")(reply.value)),
    "decisions.result": results(0, "name"),
    "decisions.probabilities": results(1, "probabilities", 0, "probability", to=0.9),
    "decisions.best": results(2, "score", to=1),
    "decisions.confidence": results(1, "confidence", to=-0.1),
    "decisions.usage": decided(put("usage", "total_tokens", to=1)),
    "decisions.levels": results(2, "probabilities", 0, "label", to="angry"),
    "decisions.error": refusals(field("value", {"error": "words alone"})),
    "decisions.values": results(0, "probabilities", 0, "value", to="true"),
    "decisions.unnamed": results(0, "name", to=""),
    "decisions.json": having(b"input_json", status(400)),
}


# -- WebSockets --------------------------------------------------------------------------------------------------------


def told(change: Callable[[Any], object], *parts: bytes, frame: str = "") -> Mutate:
    """Change the events for messages that have these parts.

    Args:
        frame: TEXT or BINARY, the frames of the messages. By default, both.
    """

    def mutate(request: Request, reply: Reply) -> None:
        frames = (frame,) if frame else ("TEXT", "BINARY")
        if request.method in frames and all(part in request.body for part in parts):
            change(reply.value)

    return mutate


_CHAINED = b'"previous_response_id"'
_SHORT = put("response", "usage", "input_tokens", to=1)


def _shared_number(event: Any) -> None:
    """Number the events of all lanes together."""
    event["sequence_number"] += event.get("stream_id") == "critic"


MUTANTS |= {
    "bidirectional.stream": told(put("token", "text", to=" another")),
    "bidirectional.binary": told(put("error", to="not a text"), frame="BINARY"),
    "bidirectional.next": told(put("generated_text", to="x"), b"nine ten"),
    "bidirectional.error": told(drop("error")),
    "upgrade.refused": at("/invocations", status(404), method="GET"),
    "responses.create": told(put("sequence_number", to=0)),
    "responses.chain": told(_SHORT, _CHAINED),
    "responses.fork": told(_SHORT, _CHAINED, b'"critic"'),
    "responses.lanes": told(_shared_number),
    "responses.warm-up": told(put("response", "output", to=[{}]), b'"generate": false'),
    "responses.unknown": told(drop("status")),
    "realtime.created": told(drop("session", "type")),
    "realtime.text": told(put("delta", to="x")),
    "realtime.error": told(drop("error", "event_id")),
}


# -- values that no server can have, or that clients of an API cannot use ----------------------------------------------


def counted(name: str) -> Mutate:
    """Give all answers one id in a header."""
    return lambda request, reply: reply.headers.update({name: "always-1"}) if reply.status == 200 else None


def of_stream(*keys: Any, to: Any) -> Mutate:
    """Set a value of each event of a stream that has it."""
    return events(_each(*keys, to=to))


IMPOSSIBLE: list[tuple[str, str, Mutate]] = [
    ("openai.ids", "openai", of_stream("id", to="chatcmpl-1")),
    ("openai.ids", "openai", at("/v1/completions", lambda reply: put("id", to="cmpl-1")(reply.value))),
    ("openai.model", "openai", of_stream("model", to="another")),
    ("openai.model", "openai", at("/v1/completions", lambda reply: put("model", to="another")(reply.value))),
    ("openai.models", "openai", at("/v1/models", lambda reply: put("data", 0, "object", to="file")(reply.value))),
    ("openai.models", "openai", at("/v1/models", lambda reply: reply.value["data"].append({"object": "adapter"}))),
    ("openai.completion-stream", "openai", of_stream("object", to="chat.completion.chunk")),
    ("openai.stream-usage", "openai", of_stream("usage", "total_tokens", to=1)),
    ("openai.chat", "openai", whole(put("object", to="chat.completion.chunk"))),
    ("openai.completion", "openai", whole(put("object", to="chat.completion"))),
    ("anthropic.ids", "anthropic", of_stream("message", "id", to="msg_1")),
    ("anthropic.model", "anthropic", of_stream("message", "model", to="another")),
    ("anthropic.message", "anthropic", whole(put("type", to="completion"))),
    ("anthropic.end", "anthropic", of_stream("usage", "output_tokens", to=900)),
    (
        "anthropic.count",
        "anthropic",
        at("/v1/messages/count_tokens", lambda reply: put("input_tokens", to=0)(reply.value)),
    ),
    ("triton.generate", "triton", whole(put("model_name", to="another"))),
    ("triton.stream", "triton", of_stream("model_name", to="another")),
    ("triton.infer", "triton", at(_INFER, lambda reply: put("model_name", to="another")(reply.value))),
    ("lmi.tokens", "lmi-0.28", whole(put("details", "tokens", 0, "log_prob", to=0.5))),
    ("lmi.tokens", "lmi-0.38", whole(put("details", "tokens", 0, "logprob", to=0.5))),
    ("lmi.chat-lines", "lmi-0.28", of_stream("object", to="chat.completion")),
    ("lmi.request-id", "lmi-0.28", counted("x-request-id")),
    ("tgi.tokens", "tgi", whole(put("details", "tokens", 0, "logprob", to=0.5))),
    ("tgi.events", "tgi", of_stream("token", "logprob", to=0.5)),
    ("tgi.tokenize", "tgi", at("/tokenize", lambda reply: put(0, "stop", to=-1)(reply.value))),
    ("systemone.mass", "decisions", decided(put("diagnostics", "refund", "label_mass", to="all"))),
    ("systemone.ids", "decisions", counted("x-request-id")),
    ("systemone.request-id", "decisions", counted("x-typesafe-request-id")),
]
"""The rule that such a value breaks, a profile of the rule, and the mutant."""
