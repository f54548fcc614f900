"""A model that says what a test's function finds in the prompt: a server of tokens, behind our engine `openai`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tests.doubles import tiny
from tests.process.engines.openai.server import DONE, HEAD, Received, Server, event, listening
from tests.servers import LiveServer, options, serve

CONTEXT = 500_000
"""Tokens: this tokenizer makes some 60,000 of what a coding agent sends first."""

_TEMPLATE = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools> Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_AT_ONCE = 40  # tokens in a write of the server's

ASKING = "<|im_start|>assistant\n"
"""How a prompt ends, which the next one of its session then has an answer behind."""


def call(name: str, **arguments: object) -> str:
    """A call of a tool as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said_by(role: str, prompt: str) -> list[str]:
    """The contents of a role's messages, `tool` for the results of calls."""
    return re.findall(rf"<\|im_start\|>{role}\n(.*?)<\|im_end\|>", prompt, re.DOTALL)


class Model:
    """Says `answer(prompt)`.

    Attributes:
        prompts: those since the last `says`, as text with the marks of the template.
        warm_ups: those that were only to be read, whose responses have one token.
        url: of the handler before it.
    """

    def __init__(self, upstream: Server, front: LiveServer, tokenizer: Tokenizer) -> None:
        self.front, self.url, self.prompts = front, front.url, list[str]()
        self.warm_ups = list[str]()
        self._tokenizer = tokenizer
        self._answer: Callable[[str], str] = str
        upstream.always = self._events

    def says(self, answer: Callable[[str], str]) -> None:
        self._answer, self.prompts, self.warm_ups = answer, [], []

    def _events(self, request: Received) -> Sequence[bytes]:
        rule = request.body.get("structured_outputs", {})
        if choices := rule.get("choice"):  # the engine tries whether rules are enforced
            first = self._tokenizer.encode(choices[0], add_special_tokens=False).ids[0]
            return [HEAD, event(first, finish="length") + DONE]
        prompt = self._tokenizer.decode(request.body["prompt"], skip_special_tokens=False)
        limit = request.body["max_tokens"]
        (self.prompts if limit > 1 else self.warm_ups).append(prompt)
        text = self._answer(prompt)
        if rule and "structural_tag" not in rule:  # a structural tag keeps the format's marks
            text = _in_array(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        events, last = [event(token) for token in ids[: limit - 1]], event(tiny.EOS[0], finish="stop")
        if len(ids) >= limit:
            last = event(ids[limit - 1], finish="length")
        writes = [b"".join(events[start : start + _AT_ONCE]) for start in range(0, len(events), _AT_ONCE)]
        return [HEAD, *writes, last + DONE]


def _in_array(calls: str) -> str:
    """Calls as they are forced: by the schema of an array, which has no room for a format's marks."""
    return f"[{', '.join(re.findall('<tool_call>(.*?)</tool_call>', calls, re.DOTALL))}]"


@contextlib.contextmanager
def scripted(directory: Path, *more: str) -> Iterator[Model]:
    """The handler and the server behind it; the model's files are made in `directory`.

    Args:
        more: further options of the handler.
    """
    tiny.make(directory)
    _change(directory / "config.json", max_position_embeddings=CONTEXT)
    _change(directory / "tokenizer_config.json", chat_template=_TEMPLATE)
    with listening() as upstream:
        upstream.models = {"data": [{"id": "served", "owned_by": "vllm", "max_model_len": CONTEXT}]}
        given = options(f"option.base_url={upstream.url}", "option.served_model_name=model,*", *more)
        with serve(str(directory), "--engine", "openai", *given) as front:
            front.wait_ready()
            yield Model(upstream, front, Tokenizer.from_file(str(directory / "tokenizer.json")))


def _change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
