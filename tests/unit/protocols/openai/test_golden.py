"""Wire bytes of OpenAI's dialects, exactly; see test_golden.py. `--update-golden` writes them anew."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import Delta, Finish
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai import chat as chat_response
from handler.protocols.openai import chat as openai_chat
from handler.protocols.openai import completions
from tests.unit.protocols.answers import deltas, failing, shorter, with_options, with_tops
from tests.unit.protocols.openai.requests import NAME_IT, NAMED, TOOLS, chat, completion, saying

GOLDEN = Path(__file__).parents[3] / "golden" / "openai"

CALL = 'Wait. <tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_call>'
ARGUMENTS = '{"city": "Köln"}'
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALWAYS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
INTERLEAVED = [delta for pair in itertools.zip_longest(deltas(0), shorter(1)) for delta in pair if delta]

THOUGHTS = {
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

CASES: dict[str, tuple[Any, list[Delta] | None]] = {
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
    "chat/bad_payload": ({"messages": [{"role": "user"}]}, None),
    "chat/bad_parameter": ({"temperature": 3}, None),
    "chat/unknown_model": ({"model": "other"}, None),
    "chat/tools": ({"tools": TOOLS}, saying(CALL)),
    "chat/stream_tools": ({**STREAM, "tools": TOOLS}, saying(CALL, 9)),
    "chat/tools_unused": ({"tools": TOOLS}, saying("No.")),
    "chat/tools_cut": ({"tools": TOOLS}, saying(CALL[:60], finish=Finish.LENGTH)),
    "chat/named_tool": ({"tools": TOOLS, "tool_choice": NAME_IT}, saying(ARGUMENTS)),
    "chat/stream_named_tool": ({**STREAM, "tools": TOOLS, "tool_choice": NAME_IT}, saying(ARGUMENTS, 9)),
    **{f"chat/reasoning_{name}": ({}, saying(text)) for name, text in THOUGHTS.items()},
    **{f"chat/stream_reasoning_{name}": (USAGE, saying(text, 9)) for name, text in THOUGHTS.items()},
    "chat/stream_tgi_reasoning_qwen3": ({**STREAM, "model": "tgi"}, saying(THOUGHTS["qwen3"], 9)),
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


@pytest.mark.parametrize("name", CASES)
def test_wire_bytes(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (openai_chat, completions):
        monkeypatch.setattr(module, "identity", lambda prefix: (f"{prefix}-0", 1711997860))
    monkeypatch.setattr(chat_response, "call_id", lambda: "call_0")
    body, script = CASES[name]
    family = name.partition("reasoning_")[2]
    context = with_options(NAMED, reasoning_parser=family)
    found: HttpResponse = {"chat": chat, "completion": completion}[name.split("/")[0]](body, script, context)
    asked = json.dumps(body, ensure_ascii=False)
    wire = f"> {asked}\n< {found.status} {found.content_type}\n".encode() + found.body
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wire)
    assert wire == path.read_bytes()


def test_every_golden_file_has_its_case() -> None:
    files = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.glob("*/*.txt")}
    assert files == set(CASES)
