"""Wire bytes, exactly: a golden file that changes is a change of the API and wants a line in CHANGELOG.md.

`pytest tests/unit/protocols/test_golden.py --update-golden` writes them anew.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handler.config.config import Config
from handler.config.lmi_version import NEWEST, OLDEST
from handler.core.errors import AnswerTooLong, PromptTooLong
from handler.core.values import Delta, Finish, Task
from handler.protocols.anthropic import response as blocks
from handler.protocols.decisions import systemone
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai import chat, completions
from handler.protocols.openai import chat as chat_response
from handler.protocols.openai import chat as openai_chat
from handler.protocols.responses import dialect as responses
from handler.protocols.responses import response
from handler.protocols.responses import response as items
from handler.protocols.vllm import pooling
from tests.one_test import in_one_test
from tests.unit.protocols.answers import (
    CONTEXT,
    NAME_IT,
    NAMED,
    TOOLS,
    VOCABULARY,
    answer,
    completion,
    deltas,
    failing,
    refused,
    saying,
    shorter,
    with_logits,
    with_options,
    with_tops,
)
from tests.unit.protocols.answers import chat as openai_chat_
from tests.unit.protocols.golden import anthropic as golden_anthropic
from tests.unit.protocols.golden.tgi import marked

WRITTEN = "`pytest -n 0 tests/unit/protocols/test_golden.py --update-golden` writes it; read what it wrote"
GOLDEN = Path(__file__).parents[2] / "golden"
ASK = "What is"

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]}

SAMPLED = {"do_sample": True, "seed": 42}

ALL = ["output_ids", "sequence_length", "output_log_probs", "cum_log_probs", "context_logits", "generation_logits"]
TENSORS = {"request_output_len": [[5]], "temperature": [0.5], "return_log_probs": [True], "pad_id": [2]}

PROMPT_TOO_LONG = refused(PromptTooLong("inputs", 9000, 8191))
ANSWER_TOO_LONG = refused(AnswerTooLong("parameters.max_new_tokens", 9, 8184, 8192))

CALL = 'Wait. <tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_call>'
INTERLEAVED = [delta for pair in itertools.zip_longest(deltas(0), shorter(1)) for delta in pair if delta]

THOUGHTS = "<think>Hm. So</think>Yes."

_DIALECTS = [path.stem for path in sorted(Path(__file__).parent.glob("golden/[a-z]*.py"))]
GOLDEN_CASES: list[Any] = [importlib.import_module(f"tests.unit.protocols.golden.{dialect}") for dialect in _DIALECTS]
"""The modules of the folder `golden`, one for each dialect."""

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    "lmi/plain": ("lmi", {"inputs": ASK}, None),
    "lmi/details": ("lmi", {"inputs": ASK, "parameters": {"details": True}}, None),
    "lmi/full_text": ("lmi", {"inputs": 'a "quoted"\nprompt', "parameters": {"return_full_text": True}}, None),
    "lmi/prefill": ("lmi", {"inputs": ASK, "parameters": {"details": True, "decoder_input_details": True}}, None),
    "lmi/best_of": ("lmi", {"inputs": ASK, "parameters": {"n": 2, "best_of": 3, **SAMPLED}}, None),
    "lmi/stream": ("lmi", {"inputs": ASK, "stream": True}, None),
    "lmi/stream_details": ("lmi", {"inputs": ASK, "stream": True, "parameters": {"details": True}}, None),
    "lmi/stream_sse": ("lmi", {"inputs": ASK, "stream": True, "parameters": {"output_formatter": "sse"}}, None),
    "lmi/stream_json": ("lmi", {"inputs": ASK, "stream": True, "parameters": {"output_formatter": "json"}}, None),
    "lmi/stream_prefill": ("lmi", {"inputs": ASK, "stream": True, "parameters": {"decoder_input_details": True}}, None),
    "lmi/stream_fails": ("lmi", {"inputs": ASK, "stream": True}, failing(2)),
    "lmi/stream_fails_sse": ("lmi", {"inputs": ASK, "parameters": {"output_formatter": "sse"}}, failing(1)),
    "lmi/stream_fails_at_once": ("lmi", {"inputs": ASK, "stream": True}, failing(0)),
    "lmi/fails": ("lmi", {"inputs": ASK}, failing(2)),
    "lmi/bad_payload": ("lmi", {"text": ASK}, None),
    "lmi/bad_parameter": ("lmi", {"inputs": ASK, "parameters": {"top_p": 2}}, None),
    "lmi/stream_bad_parameter": ("lmi", {"inputs": ASK, "stream": True, "parameters": {"top_p": 2}}, None),
    "lmi/stream_bad_parameter_sse": (
        "lmi",
        {"inputs": ASK, "stream": True, "parameters": {"top_p": 2, "output_formatter": "sse"}},
        None,
    ),
    "lmi/stream_bad_parameter_by_option": ("lmi_sse", {"inputs": ASK, "parameters": {"top_p": 2}}, None),
    "lmi/stream_bad_parameter_by_tensor": (
        "lmi",
        {"inputs": ASK, "parameters": {"streaming": [True], "top_p": 2}},
        None,
    ),
    "lmi/stream_bad_payload": ("lmi", {"inputs": [ASK, ASK], "stream": True}, None),
    # Two errors: the first is told, in the form that the rest asks for as far as it can be read.
    "lmi/two_errors_stream": ("lmi", {"inputs": ASK, "stream": "maybe", "parameters": {"top_p": 2}}, None),
    "lmi/two_errors_streaming": (
        "lmi",
        {"inputs": ASK, "stream": True, "parameters": {"streaming": "maybe", "top_p": 2}},
        None,
    ),
    "lmi/two_errors_formatter": (
        "lmi",
        {"inputs": ASK, "stream": True, "parameters": {"output_formatter": "3p", "top_p": 2}},
        None,
    ),
    "lmi/two_errors_formatter_by_option": (
        "lmi_sse",
        {"inputs": ASK, "parameters": {"output_formatter": "3p", "top_p": 2}},
        None,
    ),
    "lmi/two_errors_stream_by_option": (
        "lmi_sse",
        {"inputs": ASK, "stream": "maybe", "parameters": {"top_p": 2}},
        None,
    ),
    "lmi/two_errors_sse": (
        "lmi",
        {"inputs": [ASK, ASK], "parameters": {"output_formatter": "sse", "top_p": 2}},
        None,
    ),
    "lmi/two_errors_payload": ("lmi", {"inputs": 1, "stream": True, "parameters": "none"}, None),
    "lmi/prompt_too_long": ("lmi", {"inputs": ASK}, PROMPT_TOO_LONG),
    "lmi/answer_too_long": ("lmi", {"inputs": ASK}, ANSWER_TOO_LONG),
    "lmi/stream_prompt_too_long": (
        "lmi",
        {"inputs": ASK, "stream": True},
        PROMPT_TOO_LONG,
    ),
    "lmi/top_tokens": ("lmi", {"inputs": ASK, "parameters": {"logprobs": 2}}, with_tops()),
    "lmi/stream_top_tokens": ("lmi", {"inputs": ASK, "stream": True, "parameters": {"logprobs": 2}}, with_tops()),
    "lmi/tensors": ("lmi", {"inputs": ASK, "parameters": TENSORS}, None),
    "lmi/stream_tensors": ("lmi", {"inputs": ASK, "parameters": {**TENSORS, "streaming": [True]}}, None),
    "lmi/outputs": ("lmi", {"inputs": ASK, "parameters": {"outputs": ALL}}, with_logits()),
    "lmi/outputs_beams": (
        "lmi",
        {"inputs": ASK, "parameters": {"beam_width": [2], "pad_id": [0], "outputs": ALL[:4]}},
        [*deltas(0), *shorter(1)],
    ),
    "lmi/stream_outputs": ("lmi", {"inputs": ASK, "stream": True, "parameters": {"outputs": ALL}}, with_logits()),
    "tgi_compat/stream_bad_parameter": (
        "tgi_compat",
        {"inputs": ASK, "stream": True, "parameters": {"top_p": 2}},
        None,
    ),
    "tgi_compat/two_errors_formatter": (
        "tgi_compat",
        {"inputs": ASK, "stream": True, "parameters": {"output_formatter": "3p", "top_p": 2}},
        None,
    ),
    "tgi_compat/prompt_too_long": ("tgi_compat", {"inputs": ASK}, PROMPT_TOO_LONG),
    "tgi_compat/top_tokens": ("tgi_compat", {"inputs": ASK, "parameters": {"top_n_tokens": 2}}, with_tops()),
    "tgi_compat/best_of_top_tokens": (
        "tgi_compat",
        {"inputs": ASK, "parameters": {"top_n_tokens": 2, "best_of": 2, **SAMPLED}},
        [*with_tops(0), *with_tops(1)],
    ),
    "tgi_compat/stream_top_tokens": (
        "tgi_compat",
        {"inputs": ASK, "stream": True, "parameters": {"top_n_tokens": 2}},
        with_tops(),
    ),
    "tgi_compat/outputs": ("tgi_compat", {"inputs": ASK, "parameters": {"outputs": ALL[:2]}}, None),
    "tgi_compat/plain": ("tgi_compat", {"inputs": ASK}, None),
    "tgi_compat/no_details": ("tgi_compat", {"inputs": ASK, "parameters": {"details": False}}, None),
    "tgi_compat/sampled": ("tgi_compat", {"inputs": ASK, "parameters": SAMPLED}, None),
    "tgi_compat/prefill": ("tgi_compat", {"inputs": ASK, "parameters": {"decoder_input_details": True}}, None),
    "tgi_compat/best_of": ("tgi_compat", {"inputs": ASK, "parameters": {"best_of": 2, **SAMPLED}}, None),
    "tgi_compat/stream": ("tgi_compat", {"inputs": ASK, "stream": True}, None),
    "tgi_compat/stream_sampled": ("tgi_compat", {"inputs": ASK, "stream": True, "parameters": SAMPLED}, None),
    "tgi_compat/stream_fails": ("tgi_compat", {"inputs": ASK, "stream": True}, failing(2)),
    "tgi_compat/fails": ("tgi_compat", {"inputs": ASK}, failing(2)),
    "tgi_compat/bad_payload": ("tgi_compat", {"text": ASK}, None),
    "tgi_compat/bad_parameter": ("tgi_compat", {"inputs": ASK, "parameters": {"top_p": 2}}, None),
    "dynamic_batch/one": ("dynamic_batch", {"inputs": ASK}, None),
    "dynamic_batch/list": ("dynamic_batch", {"inputs": [ASK, "Why"]}, None),
    "dynamic_batch/full_text": ("dynamic_batch", {"inputs": ["é"], "parameters": {"return_full_text": True}}, None),
    "dynamic_batch/fails": ("dynamic_batch", {"inputs": ASK}, failing(1)),
    "dynamic_batch/completion": ("dynamic_batch", {"prompt": ASK}, None),
    "dynamic_batch/bad_payload": ("dynamic_batch", {"inputs": []}, None),
    "dynamic_batch/two_errors": (
        "dynamic_batch",
        {"inputs": [ASK, 1], "stream": "maybe", "parameters": {"top_p": 2}},
        None,
    ),
    "dynamic_batch/stream": ("dynamic_batch_streaming", {"inputs": ASK}, None),
    "dynamic_batch/stream_fails": ("dynamic_batch_streaming", {"inputs": ASK}, failing(2)),
    "chat/plain": ("lmi", CHAT, None),
    "chat/logprobs": ("lmi", {**CHAT, "logprobs": True}, None),
    "chat/top_logprobs": ("lmi", {**CHAT, "logprobs": True, "top_logprobs": 1}, None),
    "chat/alternatives": ("lmi", {**CHAT, "logprobs": True, "top_logprobs": 2}, with_tops()),
    "chat/stream_alternatives": ("lmi", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2}, with_tops()),
    "chat/n": ("lmi", {**CHAT, "n": 2}, None),
    "chat/stream": ("lmi", {**CHAT, "stream": True}, None),
    "chat/stream_top_logprobs": ("lmi", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 1}, None),
    "chat/stream_sse": ("lmi_newest", {**CHAT, "stream": True}, None),
    "chat/stream_fails": ("lmi", {**CHAT, "stream": True}, failing(2)),
    "chat/stream_fails_sse": ("lmi_newest", {**CHAT, "stream": True}, failing(1)),
    "chat/fails": ("lmi", CHAT, failing(2)),
    "chat/bad_payload": ("lmi", {"messages": [{"role": "user", "content": 5}]}, None),
    "chat/bad_parameter": ("lmi", {**CHAT, "temperature": 3}, None),
    "chat/tgi_compat": ("tgi_compat", CHAT, None),
    "chat/tgi_compat_stream": ("tgi_compat", {**CHAT, "stream": True}, None),
    "chat/tgi_compat_stream_fails": ("tgi_compat", {**CHAT, "stream": True}, failing(2)),
    "chat/tgi_compat_bad_parameter": ("tgi_compat", {**CHAT, "temperature": 3}, None),
    "chat/tools": ("lmi", {**CHAT, "tools": TOOLS}, saying(CALL)),
    "chat/stream_tools": ("lmi", {**CHAT, "tools": TOOLS, "stream": True}, saying(CALL, 9)),
    "chat/named_tool": ("lmi", {**CHAT, "tools": TOOLS, "tool_choice": NAME_IT}, saying('{"city": "Köln"}')),
    "chat/reasoning": ("lmi_reasoning", CHAT, saying(THOUGHTS)),
    "chat/stream_reasoning": ("lmi_reasoning", {**CHAT, "stream": True}, saying(THOUGHTS, 9)),
    "chat/tgi_compat_stream_reasoning": ("tgi_compat_reasoning", {**CHAT, "stream": True}, saying(THOUGHTS, 9)),
    "chat/stream_n": ("lmi", {**CHAT, "n": 2, "stream": True}, INTERLEAVED),
    "chat/foreign_name": ("lmi", {**CHAT, "max_new_tokens": 5}, None),
    "chat/dynamic_batch": ("dynamic_batch", CHAT, None),
    "chat/dynamic_batch_stream": ("dynamic_batch", {**CHAT, "stream": True}, None),
    "chat/dynamic_batch_stream_fails": ("dynamic_batch", {**CHAT, "stream": True}, failing(2)),
    "chat/dynamic_batch_bad_parameter": ("dynamic_batch", {**CHAT, "temperature": 3}, None),
    **{name: case for module in GOLDEN_CASES for name, case in module.CASES.items()},
}


def schema_of(name: str) -> str:
    """The name of the schema that a case names, without what it says of the server's options."""
    return re.sub("_(streaming|sse|newest|thinking|reasoning)$", "", CASES[name][0])


@in_one_test("name", CASES)
def test_wire_bytes(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for dialect in (chat, completions, systemone):
        monkeypatch.setattr(dialect, "identity", lambda prefix: (f"{prefix}-0", 1711997860))
    monkeypatch.setattr(response, "now", lambda: 1711997861)
    monkeypatch.setattr(chat_response, "call_id", lambda: "call_0")
    monkeypatch.setattr(blocks, "tool_use_id", lambda: "toolu_0")
    for module in (items, responses):
        monkeypatch.setattr(module, "new_id", lambda prefix: f"{prefix}_0")
    monkeypatch.setattr(pooling, "time", SimpleNamespace(time=lambda: 1711997860.5))
    monkeypatch.setattr(random, "getrandbits", lambda bits: 1234)
    monkeypatch.setattr(random, "randrange", lambda least, most: 1234)
    schema, body, script = CASES[name]
    context = replace(
        CONTEXT,
        config=Config(
            enable_streaming=schema.endswith("_streaming"),
            lmi_version=NEWEST if schema.endswith("_newest") else OLDEST,
            output_formatter="sse" if schema.endswith("_sse") else None,
            reasoning_parser="qwen3" if schema.endswith("_reasoning") else None,
        ),
        chat_template=golden_anthropic.TEMPLATE if schema.endswith("_thinking") else "",
        labels=("no", "yes", "perhaps"),
        task=Task.CLASSIFICATION if schema == "vllm_classify" else Task.GENERATION,
        vocabulary=VOCABULARY if "embed" in schema else None,
        no_media={"audio": ""} if schema in ("openai_transcriptions", "openai_translations") else CONTEXT.no_media,
    )
    found = answer(schema_of(name), body, script, context)
    asked = body.decode() if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False)
    wire = f"> {asked}\n< {found.status} {found.content_type}\n".encode() + found.body
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(wire)
    assert path.exists(), f"{path} is missing: {WRITTEN}"
    assert wire == path.read_bytes(), f"{path} has other bytes. Where the API is to change: {WRITTEN}"


def test_every_golden_file_has_its_case() -> None:
    files = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.glob("*/*.txt")}
    left = sorted(file for file in files - set(CASES) if not file.startswith("sockets/"))  # of whole sessions
    assert not left, f"delete from tests/golden/, or add to CASES: {', '.join(left)}"


@in_one_test(("name", "tops"), [("mindie", 0), *itertools.product(("lmi", "tgi_compat", "tgi"), (0, 1))])
def test_a_streams_text_is_that_of_the_whole_answer(name: str, tops: int) -> None:
    """A special token within the answer is in both, or in neither: tokens with alternatives are written another way."""
    parameters = {"details": True, "max_new_tokens": 9, **({"top_n_tokens": tops} if tops else {})}
    whole, stream = (
        answer(name, {"inputs": "What is", "parameters": parameters, "stream": stream}, marked())
        for stream in (False, True)
    )
    assert (whole.status, stream.status) == (200, 200), (whole.body, stream.body)
    found = json.loads(whole.body)
    last = json.loads(stream.body.splitlines()[-1 if name == "lmi" else -2].removeprefix(b"data:"))
    assert last["generated_text"] == (found[0] if isinstance(found, list) else found)["generated_text"]


# -- openai ------------------------------------------------------------------------------------------------------------
# Wire bytes of OpenAI's dialects, exactly; see test_golden.py. `--update-golden` writes them anew.


OPENAI_GOLDEN = Path(__file__).parents[2] / "golden" / "openai"

ARGUMENTS = '{"city": "Köln"}'
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALWAYS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

OPENAI_THOUGHTS = {
    "deepseek_r1": "Hm.\n</think>\n\nYes.",
    "deepseek_v3": "Yes.",
    "qwen3": "<think>\nHm. So\n</think>\n\nYes.",
    "glm45": "\n<think>Hm. So</think>\nYes.",
    "glm47": "Hm. So</think>Yes.",
    "minimax_m2": "Hm. So\n</think>\n\nYes.",
    "minimax_m2_append_think": "Hm. So\n</think>\n\nYes.",
    "kimi_k2": "<think>Hm. So </think>Yes.",
    "mistral": "[THINK]Hm. So[/THINK]Yes.",
    "gemma4": "<|channel>thought\nHm. So\n<channel|>Yes.",
    "openai_gptoss": "<|channel|>analysis<|message|>Hm. So<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    "granite": "Here is my thought process: Hm. So Here is my response: Yes.",
    "nemotron_v3": "Hm. So\n</think>\nYes.",
    "seed_oss": "<seed:think>Hm. So</seed:think>Yes.",
}

OPENAI_CASES: dict[str, tuple[Any, list[Delta] | None]] = {
    "chat/plain": ({}, None),
    "chat/logprobs": ({"logprobs": True}, None),
    "chat/top_logprobs": ({"logprobs": True, "top_logprobs": 2}, with_tops()),
    "chat/n": ({"n": 2}, [*deltas(0), *shorter(1)]),
    "chat/stream": (STREAM, None),
    "chat/stream_usage": (USAGE, None),
    "chat/stream_usage_always": (ALWAYS, saying("ab cd")),
    "chat/stream_logprobs": ({**STREAM, "logprobs": True, "top_logprobs": 2}, with_tops()),
    "chat/stream_n": ({**USAGE, "n": 2}, INTERLEAVED),
    "chat/stream_tgi": ({**STREAM, "model": "tgi"}, saying("ab cd")),
    "chat/stream_fails": (STREAM, failing(2)),
    "chat/fails": ({}, failing(2)),
    "chat/bad_payload": ({"messages": [{"role": "user", "content": 5}]}, None),
    "chat/bad_parameter": ({"temperature": 3}, None),
    "chat/unknown_model": ({"model": "other"}, None),
    "chat/tools": ({"tools": TOOLS}, saying(CALL)),
    "chat/stream_tools": ({**STREAM, "tools": TOOLS}, saying(CALL, 9)),
    "chat/tools_unused": ({"tools": TOOLS}, saying("No.")),
    "chat/tools_cut": ({"tools": TOOLS}, saying(CALL[:60], finish=Finish.LENGTH)),
    "chat/named_tool": ({"tools": TOOLS, "tool_choice": NAME_IT}, saying(ARGUMENTS)),
    "chat/stream_named_tool": ({**STREAM, "tools": TOOLS, "tool_choice": NAME_IT}, saying(ARGUMENTS, 9)),
    **{f"chat/reasoning_{name}": ({}, saying(text)) for name, text in OPENAI_THOUGHTS.items()},
    **{f"chat/stream_reasoning_{name}": (USAGE, saying(text, 9)) for name, text in OPENAI_THOUGHTS.items()},
    "chat/stream_tgi_reasoning_qwen3": ({**STREAM, "model": "tgi"}, saying(OPENAI_THOUGHTS["qwen3"], 9)),
    "completion/plain": ({}, None),
    "completion/prompts": ({"prompt": ["a", "b"]}, None),
    "completion/logprobs": ({"logprobs": 2}, with_tops()),
    "completion/echo": ({"prompt": "What is", "echo": True, "logprobs": 0}, None),
    "completion/token_ids": ({"return_token_ids": True}, None),
    "completion/stream_token_ids": ({**STREAM, "return_token_ids": True}, None),
    "completion/best_of": ({"n": 1, "best_of": 2}, [*shorter(0), *deltas(1)]),
    "completion/stream": (STREAM, None),
    "completion/stream_prompts": ({**USAGE, "prompt": ["a", "b"], "echo": True}, saying("ab cd")),
    "completion/stream_logprobs": ({**STREAM, "logprobs": 2}, with_tops()),
    "completion/stream_echo": ({**STREAM, "prompt": "What is", "echo": True, "logprobs": 0}, None),
    "completion/stream_fails": (STREAM, failing(1)),
    "completion/bad_payload": ({"prompt": []}, None),
    "completion/bad_parameter": ({"suffix": "x"}, None),
}


@pytest.mark.parametrize("name", OPENAI_CASES)
def test_openais_wire_bytes(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (openai_chat, completions):
        monkeypatch.setattr(module, "identity", lambda prefix: (f"{prefix}-0", 1711997860))
    monkeypatch.setattr(chat_response, "call_id", lambda: "call_0")
    body, script = OPENAI_CASES[name]
    family = name.partition("reasoning_")[2]
    context = with_options(NAMED, reasoning_parser=family)
    found: HttpResponse = {"chat": openai_chat_, "completion": completion}[name.split("/")[0]](body, script, context)
    asked = json.dumps(body, ensure_ascii=False)
    wire = f"> {asked}\n< {found.status} {found.content_type}\n".encode() + found.body
    path = OPENAI_GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wire)
    assert wire == path.read_bytes()


def test_every_golden_file_of_openais_has_its_case() -> None:
    files = {str(path.relative_to(OPENAI_GOLDEN).with_suffix("")) for path in OPENAI_GOLDEN.glob("*/*.txt")}
    assert files == set(OPENAI_CASES)
