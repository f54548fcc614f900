"""A user's files, for tests: the text of a model.py with formatters, and directories with an adapter."""

from __future__ import annotations

import json
from pathlib import Path

# -- the text of a model.py with formatters, for tests: with our imports, or with djl_python's own ---------------------


OWN = "from handler.formatters import Input, TextGenerationOutput, TextInput, input_formatter, output_formatter\n"

DJL = """
from djl_python import Input
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
from djl_python.request_io import TextInput
"""

LINES = '''
import json


class Question(TextInput):
    shout = False


@input_formatter
def read_question(input_item: Input, **kwargs) -> TextInput:
    """`{"question", "tokens"?, "stream"?, "shout"?, "more"?}` to a request."""
    body = input_item.get_as_json()
    question = Question()
    question.input_text = body["question"]
    question.parameters = {"max_new_tokens": body.get("tokens", 3), "stream": body.get("stream", False)}
    question.parameters.update(body.get("more", {}))
    question.shout = body.get("shout", False)
    return question


@output_formatter
def write_lines(request_output: TextGenerationOutput) -> str:
    """A line a token: `{"index", "text", "first"?, "finish"?}`."""
    sequence = request_output.sequences[request_output.best_sequence_index]
    token, index, first, last = sequence.get_next_token()
    line = {"index": index, "text": token.text.upper() if request_output.input.shout else token.text}
    if first:
        line["first"] = True
    if last:
        line["finish"] = sequence.finish_reason
    return json.dumps(line) + "\\n"
'''
"""Asked `{"question": "a b"}`, echo's answer is ANSWER, whether it streams or not."""

ANSWER = (
    '{"index": 0, "text": " a", "first": true}\n{"index": 1, "text": " b"}\n'
    '{"index": 2, "text": " a", "finish": "length"}\n'
)

LEGACY = """
from handler.formatters import output_formatter


@output_formatter
def write_legacy(token, first_token, last_token, details, generated_text, id):
    return f"{'<' if first_token else ''}{token.text}{'>' + generated_text if last_token else ''}"
"""
"""Asked "a b" for 3 tokens: LEGACY_ANSWER."""

LEGACY_ANSWER = "< a b a> a b a"

PAYLOADS = """
from handler.formatters import input_formatter, output_formatter


@input_formatter
def rename(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
    decoded_payload["inputs"] = decoded_payload.pop("inputPrompt")
    decoded_payload.setdefault("parameters", {}).setdefault("max_new_tokens", len(tokenizer.encode("a b c")))
    return decoded_payload


@output_formatter
def wrap(response_data: dict) -> dict:
    return {"wrapped": response_data}
"""


def write_model(directory: Path, text: str) -> Path:
    """A model directory with that model.py and an empty serving.properties, which is returned."""
    (directory / "model.py").write_text(text)
    properties = directory / "serving.properties"
    properties.write_text("")
    return properties


# -- directories that hold an adapter as PEFT writes it, for tests: small, and of no use to a real model ---------------


def write_adapter(directory: Path, *, weights: str = "adapter_model.safetensors", **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    (directory / weights).write_bytes(b"")
    return directory
