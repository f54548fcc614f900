"""Requests that every host must answer alike, a row each, with what the echo engine says to it.

Made for `option.echo_cues=true`. What a value of the wire looks like in full is in tests/golden; here counts that
nothing is lost on the way through a host.
"""

from __future__ import annotations

import gzip
import json
from typing import Any, NamedTuple


class Row(NamedTuple):
    """`body` is sent as JSON unless it is bytes, which are sent as they are.

    `says` is the generated text of an answer, the texts of a list joined by `|`, or a part of an error's text; None
    is for what the schemas say differently.
    """

    name: str
    status: int
    says: str | None
    body: Any
    headers: dict[str, str]
    query: str = ""

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


JSON = {"content-type": "application/json"}
_GZIP = {**JSON, "content-encoding": "gzip"}
_FUNCTION = {"type": "function", "function": {"name": "f"}}
FORM = {"content-type": "application/x-www-form-urlencoded"}
UNICODE = 'é 日本語 🙂 👩\u200d🚀 עברית "quoted" back\\slash a\u0301 \U00020000 a\u2028b c\x85d <b>'
WORDS = "".join(f" {word}" for word in UNICODE.split())  # as the echo engine says them


def ask(name: str, says: str | None = " a b c a b", prompt: Any = "a b c", **parameters: Any) -> Row:
    """One prompt with parameters."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 5, **parameters}}
    return Row(name, 200, says, body, JSON)


def refuse(name: str, says: str, prompt: Any = "a b c", **parameters: Any) -> Row:
    return ask(name, says, prompt, **parameters)._replace(status=424)


def stream(row: Row) -> Row:
    return row._replace(name=f"stream: {row.name}", body={**row.body, "stream": True})


def send(name: str, status: int, says: str, body: Any, headers: dict[str, str] | None = None, query: str = "") -> Row:
    """Whatever it is."""
    return Row(name, status, says, body, JSON if headers is None else headers, query)


def chat(name: str, says: str | None, *contents: str, status: int = 200, **fields: Any) -> Row:
    """Messages of the user and of the assistant in turn."""
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents)]
    return Row(f"chat: {name}", status, says, {"messages": messages, "max_tokens": 5, **fields}, JSON)


def triton(name: str, says: str | None, status: int = 200, **names: Any) -> Row:
    """A body of Triton's generate extension."""
    return Row(f"triton: {name}", status, says, {"text_input": "a b c", "max_tokens": 5, **names}, JSON)


def completion(name: str, says: str, status: int = 200, **fields: Any) -> Row:
    """A body of OpenAI's completions."""
    return Row(f"completion: {name}", status, says, {"prompt": "a b c", "max_tokens": 5, **fields}, JSON)


def routed(name: str, path: str, status: int, says: str, body: Any) -> Row:
    """SageMaker's custom attributes name a route."""
    return send(f"route: {name}", status, says, body, {**JSON, "x-amzn-sagemaker-custom-attributes": f"route={path}"})


def header(name: str, status: int, says: str, **headers: str) -> Row:
    """`_ASK` with headers."""
    return send(name, status, says, _ASK, {**JSON, **{key.replace("_", "-"): text for key, text in headers.items()}})


def _decision(question: Any) -> dict[str, Any]:
    """A body of System One."""
    return {"state": "a", "questions": {"q": question}}


_ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
NO_ADAPTERS = "the engine echo serves no LoRA adapters: it was started without option.enable_lora=true"
# Names that DJL's protocol itself uses, in its own spelling.
_DJLS = {"batch_size": "7", "reset_rollingbatch": "true", "rolling_batch": "disable", "output_formatter": "sse"}

ENVELOPE = (
    send("charset", 200, " a b a", _ASK, {"content-type": "application/json; charset=utf-8"}),
    send("json by another name", 200, " a b a", _ASK, {"content-type": "application/vnd.x+json"}),
    send("no content type", 200, " a b a", _ASK, {}),
    send("form that is JSON", 200, " a b a", _ASK, FORM),
    send("no body", 424, "the body is empty", b""),
    send("empty form", 424, "the body is empty", b"", FORM),
    send("plain text", 200, " a ü 🙂" * 10, "a ü 🙂".encode(), {"content-type": "text/plain"}),
    send("plain text in another charset", 424, "not UTF-8", "a ü".encode("latin-1"), {"content-type": "text/plain"}),
    send("unsupported media", 415, "'text/csv'", b"a,b", {"content-type": "text/csv"}),
    send("gzip", 200, " a b a", gzip.compress(json.dumps(_ASK).encode(), mtime=0), _GZIP),
    send("not gzip", 424, "not compressed as its Content-Encoding says", _ASK, _GZIP),
    send("unsupported encoding", 415, "'br'", _ASK, {**JSON, "content-encoding": "br"}),
    header("session header", 400, "stateful sessions not enabled", X_Amzn_SageMaker_Session_Id="NEW_SESSION"),
    send("session's call", 400, "stateful sessions not enabled", {"requestType": "NEW_SESSION"}),
    send("session's call with inputs", 400, "must have no other fields", {"requestType": "CLOSE", "inputs": "a"}),
    header("adapter header", 424, NO_ADAPTERS, X_Amzn_SageMaker_Adapter_Identifier="mine"),
    header("adapter property", 424, NO_ADAPTERS, adapter="mine"),
    header("custom attributes", 200, " a b a", X_Amzn_SageMaker_Custom_Attributes="a=b;c=d"),
    header("adapter in custom attributes", 424, NO_ADAPTERS, X_Amzn_SageMaker_Custom_Attributes="adapter=mine"),
    header("accept", 200, " a b a", accept="application/jsonlines"),
    send("headers named as DJL's own", 200, " a b a", _ASK, {**JSON, **_DJLS}),
    send("query", 200, " a b a", _ASK, query="?seed=1&batch_000.data=x&inputs=y"),
    send("query that is a body", 200, " a b a", _ASK, query="?data=x"),
    send("malformed", 424, "not valid JSON", b'{"inputs": "a'),
    send("malformed UTF-8", 424, "not UTF-8", b'{"inputs": "\xff"}'),
    send("number", 424, "must be a JSON object", b"7"),
    send("key twice", 200, " b" * 3, b'{"inputs": "a", "parameters": {"max_new_tokens": 3}, "inputs": "b"}'),
    send("NaN", 424, "NaN", b'{"inputs": "a", "parameters": {"temperature": NaN}}'),
    send("lone surrogate", 424, "surrogate", b'{"inputs": "\\ud800"}'),
    send("text after the document", 424, "not valid JSON", b'{"inputs": "a"} more'),
    send("decision", 200, "a", _decision({"type": "choice", "instructions": "Which?", "criteria": {"a": None}})),
    send("decision refused", 422, "questions.q.type: ", _decision({"type": "essay"})),
    send("decision in OpenAI's form, refused", 400, "questions: must be", {"input": "a", "questions": []}),
    send("missing inputs", 424, "no 'inputs'", {"parameters": {}}),
    send("empty inputs", 424, "'inputs' must be", {"inputs": ""}),
    send("inputs without tokens", 424, "'inputs' has no tokens", {"inputs": "   "}),
    send("inputs a number", 424, "'inputs' must be", {"inputs": 7}),
    send("inputs null", 424, "no 'inputs'", {"inputs": None}),
    send("parameters a list", 424, "'parameters' must be an object", {"inputs": "a", "parameters": [1]}),
    send("stream a number", 424, "'stream'", {"inputs": "a", "stream": 2}),
    send("adapters in the body", 424, "'adapters'", {**_ASK, "adapters": ["mine"]}),
    send("unknown names", 200, " a a", {"inputs": "a", "m": 1, "parameters": {"max_new_tokens": 2, "ä\r\nx: y": 2}}),
)  # fmt: skip
"""Media, headers, and bodies that are no request."""

GENERATION = (
    send("defaults", 200, " a b c" * 10, {"inputs": "a b c"}),
    ask("plain"),
    ask("full text", "a b c a b c a b", return_full_text=True),
    ask("stop", " a b ", "a b c d", stop_sequences=["c"], include_stop_str_in_output=False),
    ask("stop in the mode's own way", None, "a b c d", stop_sequences=["c"]),
    ask("stop across tokens", " a b c", "a b c d", stop=["b c", "nowhere"], include_stop_str_in_output=True),
    ask("stop token", " a b", "a b c d", stop_token_ids=[5], include_stop_str_in_output=True),
    ask("truncate", " c c c c c", truncate=1),
    ask("truncate a long prompt", " y z y z y", "y z " * 3000, truncate=2),
    ask("unicode", UNICODE + WORDS, UNICODE, max_new_tokens=len(UNICODE.split()), return_full_text=True),
    ask("line ends and escapes", ' "x" \\n\x1b "x" \\n\x1b "x"', '\r\n\t"x" \\n\x1b'),
    ask("seed", do_sample=True, seed=2**64 - 1, temperature=0.5, top_k=3, top_p=0.9),
    ask("min_length", min_length=3),
    ask("long answer", " lorem ipsum" * 1000, "lorem ipsum " * 50, max_new_tokens=2000),
    ask("null means absent", temperature=None, stop=None),
    refuse("temperature", "parameters.temperature=-1: ", temperature=-1),
    refuse("top_p", "parameters.top_p=7: ", top_p=7),
    refuse("top_k a string", 'parameters.top_k="3": ', top_k="3"),
    refuse("no new tokens", "parameters.max_new_tokens=0: ", max_new_tokens=0),
    refuse("more than the context", "with 3 prompt tokens it must be at most", max_new_tokens=1 << 21),
    refuse("truncate to nothing", "parameters.truncate=0: ", truncate=0),
    refuse("negative seed", "parameters.seed=-1: ", seed=-1),
    refuse("empty stop", "parameters.stop=", stop=[""]),
    refuse("names that disagree", "contradicts", request_output_len=[[3]]),
    refuse("stop token outside the vocabulary", "stop_token_ids: 999", stop_token_ids=[999]),
    refuse("error beyond ASCII", "é <日本> & '\\r\\n\\\"🙂", temperature="é <日本> & '\r\n\"🙂"),
    refuse("long error", "xxxx...: must be a number", temperature="x" * 5000),
    refuse("not in the engine", "the engine echo does not support it", bad_sequences=["b"]),
    refuse("adapter_id", NO_ADAPTERS, adapter_id="mine"),
    refuse("lora_task_id", NO_ADAPTERS, lora_task_id=[1]),
    ask("tensors", " a b c", request_output_len=[[3]], max_new_tokens=None, temperature=[0.5], runtime_top_k=[3]),
    ask("end_id", " a b", "a b c d", end_id=[5], include_stop_str_in_output=True),
    ask("stop_words_list", " a b", "a b c d", stop_words_list=[[5], [1]], include_stop_str_in_output=True),
    refuse("a list of words", "parameters.stop_words_list=[[5]]: must be a tensor", stop_words_list=[[5]]),
    refuse("ids", "parameters.input_ids=[5]: is not supported: the engine echo has no vocabulary", None, input_ids=[5]),
    refuse("a guide", "parameters.guided_regex=", guided_regex="a+"),
    refuse("alternatives", "parameters.logprobs=2: ", logprobs=2),
    refuse("failing: refused by the engine", "refused on cue", "a <refuse>"),
    refuse("failing: at once", "raised on cue", "<raise> a"),
)
"""Parameters of whole answers, which all modes have."""

AMID = refuse("failing: amid the answer", "raised on cue", "a b <raise>")
_STOP = ask("stop across tokens", " a b c", "a b c d", stop=["b c"], include_stop_str_in_output=True, details=True)
_TRITON = {"text_input": "a b", "max_tokens": 3}
_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_TALK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
_TOP_P = {"inputs": "a", "parameters": {"top_p": 1.0}}
_PART = {"type": "text", "text": "a"}
_IMAGE = {"type": "image_url", "image_url": {"url": "x"}}

ROLLING = (
    *ENVELOPE,
    *GENERATION,
    AMID,
    ask("details", details=True),
    ask("no details", details=False),
    ask("details and a stop", " a b c", "a b c d", stop=["c"], include_stop_str_in_output=True, details=True),
    ask("details of unicode", WORDS, UNICODE, max_new_tokens=len(UNICODE.split()), details=True),
    ask("outputs", outputs=["output_ids", "sequence_length", "cum_log_probs"]),
    ask("log-probabilities", return_log_probs=[True]),
    ask("streaming", streaming=[True]),
    ask("n", n=3),
    ask("best_of", best_of=3, do_sample=True, seed=1),
    ask("best_of and n, no seed", best_of=3, n=2, do_sample=True, details=True),
    refuse("best_of below n", "parameters.best_of=2: ", best_of=2, n=3),
    refuse("n above the batch", "parameters.n=33: ", n=33),
    refuse("decoder_input_details", "parameters.decoder_input_details=true: ", decoder_input_details=True),
    refuse("beams", "parameters.num_beams=2: ", num_beams=2),
    refuse("formatter of chats", "parameters.output_formatter=", output_formatter="json_chat"),
    ask("unknown formatter", output_formatter="xml"),
    ask("json", output_formatter="json"),
    ask("jsonlines", output_formatter="jsonlines"),
    ask("sse", output_formatter="sse"),
    refuse("list", "'inputs' must be one string under rolling batch", ["a", "b"]),
    stream(ask("plain")),
    stream(ask("details", details=True)),
    stream(ask("no details", details=False)),
    stream(ask("json", output_formatter="json")),
    stream(ask("jsonlines", output_formatter="jsonlines", details=True)),
    stream(ask("sse", output_formatter="sse", details=True)),
    stream(ask("one token", " a", max_new_tokens=1)),
    stream(ask("long", " lorem ipsum" * 1000, "lorem ipsum " * 50, max_new_tokens=2000)),
    stream(ask("full text", return_full_text=True)),
    stream(ask("stop in the mode's own way", None, "a b c d", stop=["c"])),
    stream(_STOP),
    stream(ask("unicode", WORDS, UNICODE, max_new_tokens=len(UNICODE.split()), details=True)),
    stream(ask("seed", do_sample=True, seed=7)),
    stream(refuse("several", "must be 1 when streaming", n=2)),
    stream(refuse("top_p", "parameters.top_p=7: ", top_p=7)),
    stream(refuse("top_p, as events", "parameters.top_p=7: ", top_p=7, output_formatter="sse")),
    stream(refuse("more than the context", "with 3 prompt tokens it must be at most", max_new_tokens=1 << 21)),
    stream(refuse("failing: at once", "raised on cue", "<raise> a")),
    stream(ask("failing: amid the answer", " a b", "a b <raise>")),
    send("stream in parameters", 200, " a b a", {"inputs": "a b", "parameters": {"max_new_tokens": 3, "stream": True}}),
    send("stream with unknown names", 200, " a b a", {**_ASK, "stream": True, "x": 1}),
    send("inputs and messages", 200, " a b a", {**_ASK, "messages": [{"role": "user", "content": "x"}]}),
    chat("plain", " user: a ü assistant: user:", "a ü"),
    chat("turns", " user: a assistant: b user:", "a", "b", "c"),
    chat("n", " user: a assistant: user: a", "a", n=2),
    chat("logprobs", " user: a assistant: user: a", "a", logprobs=True, top_logprobs=1),
    chat("stop", " user: ", "a", stop=["a"]),
    chat("seed", " user: a assistant: user: a", "a", temperature=0.7, seed=3),
    chat("unknown names", " user: a assistant: user: a", "a", x=3),
    chat("tools", " user: a assistant: user: a", "a", tools=[_FUNCTION], tool_choice="none"),
    chat("stream", " user: a assistant: user: a", "a", stream=True),
    chat("stream of unicode", f" user:{WORDS} assistant:", UNICODE, stream=True, max_tokens=len(UNICODE.split()) + 2),
    chat("stream with logprobs", " user: a assistant: user: a", "a", stream=True, logprobs=True, top_logprobs=1),
    chat("stream failing amid", " user: a", "a <raise>", stream=True),
    chat("stream refused", "temperature=3: ", "a", status=424, stream=True, temperature=3),
    chat("temperature", "temperature=3: ", "a", status=424, temperature=3),
    chat("more than the context", "prompt tokens it must be at most", "a", status=424, max_tokens=1 << 21),
    chat("wrong tools", "tools[0]: ", "a", status=424, tools=[{"type": "function"}]),
    chat("no messages", "'messages' must be", status=424),
    send("chat: role", 424, "messages[0]", {"messages": [{"role": "robot", "content": "a"}]}),
    send("chat: image", 424, "image_url", {"messages": [{"role": "user", "content": [_PART, _IMAGE]}]}),
    triton("plain", "a b c a b c a b"),
    triton("failing", "raised on cue", 400, text_input="<raise> a"),
    triton("prompt left out", " a b c a b", exclude_input_in_output=True, id="7"),
    send("triton: llmapi", 200, " a b a", {"text_input": ["a b"], "parameters": {"sampling_param_max_tokens": 3}}),
    triton("log-probabilities", "a b c a b c a b", return_log_probs=True, return_finish_reason=True),
    triton("stop", "a b c a b ", stop_words=["c"], bad_words=""),
    triton("sequences", "a b c a b c a b|a b c a b c a b", num_return_sequences=2),
    triton("unknown names", "a b c a b c a b", accumulate_tokens=True, parameters={"x": 1}),
    triton("stream", " a b c a b", stream=True),
    triton("stream failing at once", "raised on cue", 400, text_input="<raise> a", stream=True),
    triton("stream of unicode", WORDS, text_input=UNICODE, stream=True, max_tokens=len(UNICODE.split()), id="ü 🙂"),
    triton("stream refused", "top_p=7: ", 400, stream=True, top_p=7),
    triton("refused", "max_tokens=0: ", 400, max_tokens=0),
    triton("more than the context", "prompt tokens it must be at most", 400, max_tokens=1 << 21),
    triton(
        "structured_output",
        "the engine echo does not support it",
        400,
        guided_decoding_guide_type="regex",
        guided_decoding_guide="a+",
    ),
    triton("array", "parameter 'x' has invalid type", 400, x=[1]),
    routed("generate", "/v2/models/model/generate", 200, "a b a b a", _TRITON),
    routed("stream", "/v2/models/model/versions/1/generate_stream", 200, " a b a", _TRITON),
    routed("its own refusal", "/v2/models/model/generate", 400, "['text_input']", _ASK),
    routed("not JSON", "/v2/models/model/generate", 400, "failed to parse the request JSON buffer", b"x"),
    triton("stream failing amid", " a b", text_input="a b <raise>", stream=True),
    routed("the mode's own", "/invocations", 200, " a b a", _ASK),
    chat("stream with usage", " user: a assistant: user: a", "a", **_USAGE),
    completion("plain", " a b c a b"),
    completion("several", " a b a b a", prompt=["a b", "c"], n=2),
    completion("unknown names", " a b c a b", user="me", x=1),
    completion("stream", " a b c a b", **_USAGE),
    completion("stream of unicode", WORDS, prompt=UNICODE, stream=True, max_tokens=len(UNICODE.split())),
    completion("stream failing amid", " a b", prompt="a b <raise>", stream=True),
    completion("stream refused", "top_p=7: ", 400, stream=True, top_p=7),
    completion("refused", "top_p=7: ", 400, top_p=7),
    completion("more than the context", "prompt tokens it must be at most", 400, max_tokens=1 << 21),
    routed("openai chat", "/v1/chat/completions", 200, " user: a", _TALK),
    routed("openai chat, stream", "/v1/chat/completions", 200, " user: a", {**_TALK, **_USAGE}),
    routed("openai chat, no such model", "/v1/chat/completions", 404, "other", {**_TALK, "model": "other"}),
    routed("openai chat, a completion", "/v1/chat/completions", 400, "'messages'", {"prompt": "a"}),
    routed("decision", "/v1/systemone", 200, "a", _decision({"type": "choice", "criteria": {"a": None}})),
    routed("openai completions", "/v1/completions", 200, " a b a", {"prompt": "a b", "max_tokens": 3}),
    routed("tgi", "/", 200, "a b a b a", _ASK),
    routed("tgi generate", "/generate", 200, " a b a", _ASK),
    routed("tgi stream", "/generate_stream", 200, " a b a", _ASK),
    routed("tgi refused", "/generate", 422, "`top_p` must be > 0.0 and < 1.0", _TOP_P),
    routed("tgi stream refused", "/generate_stream", 200, "", _TOP_P),
    send("chat: parts", 200, " user: a", {"messages": [{"role": "user", "content": [_PART]}], "max_tokens": 2}),
)
"""LMI's schema and TGI_COMPAT, under rolling batch and in async mode."""

DYNAMIC = (
    *ENVELOPE,
    *GENERATION,
    AMID,
    ask("list", " a a a a a| b c b c b| ü 🙂 ü 🙂 ü", ["a", "b c", "ü 🙂"]),
    ask("list of one", " a a a a a", ["a"]),
    refuse("list with an empty string", "'inputs' must be", ["a", ""]),
    refuse("list without tokens in one", "'inputs' has no tokens", ["a", "  "]),
    refuse("empty list", "'inputs' must be", []),
    refuse("too long a list", "33 prompts", ["a"] * 33),
    refuse("failing: one of a list", "refused on cue", ["a", "<refuse>"]),
    refuse("details", "parameters.details", details=True),
    refuse("decoder_input_details", "parameters.decoder_input_details", decoder_input_details=True),
    refuse("n", "must be 1", n=2),
    refuse("outputs", "only available with rolling batch", outputs=["output_ids"]),
    send("stream without effect", 200, " a b a", {**_ASK, "stream": True}),
    chat("one", " user: a assistant: user: a", "a"),
    chat("wrong", "temperature=9", "a", status=424, temperature=9),
    completion("one", " a b c a b"),
    triton("one", "a b c a b c a b"),
    routed("tgi", "/generate", 200, " a b", {"inputs": "a b c", "parameters": {"max_new_tokens": 2}}),
)
"""Dynamic batch, whose answers are lists."""

DYNAMIC_STREAM = (
    *GENERATION,
    ask("failing: amid the answer", " a b", "a b <raise>"),
    ask("list of one", " a a a a a", ["a"]),
    ask("list", " a a a a a| b c b c b", ["a", "b c"]),
    ask("failing: one of a list", " a| b", ["a", "b <raise>"]),
    send("malformed", 424, "not valid JSON", b'{"inputs": "a'),
    send("unknown names", 200, " a b a", {**_ASK, "x": 1}),
)
"""Dynamic batch with option.enable_streaming=true."""
