"""Mistral's own tokenizer gives the ids of vLLM's, for prompts, chats and tools; its vocabulary gives the text back."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.core.errors import ConfigError, InvalidPayload
from handler.core.values import TemplateOptions
from handler.engines.base import EngineConfig
from handler.engines.huggingface.tokenizer import MistralTokenizer
from handler.engines.vllm.engine import load_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

_MARKS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_WORDS = (b"th", b"the", b" the", b"er", b"in", b"hello", " é".encode())
_CALL = {"id": "call_123456789", "type": "function", "function": {"name": "look", "arguments": {"at": "Köln"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tekken.json of version 3 with the 256 bytes and a few words."""
    pieces = [*(bytes([byte]) for byte in range(256)), *_WORDS]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    special = [{"rank": rank, "token_str": mark, "is_control": True} for rank, mark in enumerate(_MARKS)]
    config = {
        "pattern": r"[^\s]+|\s+(?=[^\s])|\s+",
        "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v3",
    }
    directory = tmp_path_factory.mktemp("mistral")
    (directory / "tekken.json").write_text(
        json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special})
    )
    return directory


@pytest.fixture(scope="module")
def ours(model: Path) -> MistralTokenizer:
    lines = ("option.llm_engine=vllm", "option.tokenizer_mode=mistral")
    found = load_tokenizer(EngineConfig(read_config(overrides=lines, environ={}).checked(), model))
    assert isinstance(found, MistralTokenizer)
    return found


@pytest.fixture(scope="module")
def vllms(model: Path) -> Any:
    from vllm.tokenizers.mistral import MistralTokenizer as Theirs

    return Theirs.from_pretrained(str(model))


@pytest.mark.parametrize("text", ["hello the world", "Köln é 😀", "[INST] is text here </s>"])
def test_a_prompt_has_vllms_ids_and_comes_back(ours: MistralTokenizer, vllms: Any, text: str) -> None:
    ids = list(ours.encode(text).ids)
    assert ids == vllms.encode(text)
    assert ours.vocabulary is not None
    assert ours.vocabulary.decode(ids[1:]) == text
    assert ids[0] in ours.vocabulary.special


_CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_123456789", "content": "seen"},
    ],
)


@pytest.mark.parametrize("messages", _CHATS)
@pytest.mark.parametrize("tools", [[], [_TOOL]])
def test_a_chat_has_vllms_ids(
    ours: MistralTokenizer, vllms: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    ids = list(ours.encode_chat(messages, tools).ids)
    given = json.loads(json.dumps(messages))
    for message in given:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"][-9:]
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if "tool_call_id" in message:
            message["tool_call_id"] = message["tool_call_id"][-9:]
    assert ids == vllms.apply_chat_template(given, tools or None, add_generation_prompt=True)


def test_an_answer_is_continued_in_mistral_tokenizer(ours: MistralTokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}]
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert ours.vocabulary is not None
    assert ours.vocabulary.decode(ours.encode_chat(messages, options=options).ids).endswith("the")


def test_what_it_cannot_lay_out_is_refused(ours: MistralTokenizer) -> None:
    with pytest.raises(InvalidPayload, match="text only"):
        ours.encode_chat([{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(InvalidPayload, match="refuses them"):
        ours.encode_chat([{"role": "tool", "content": "x"}])


def test_a_directory_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has none of tekken\.json"):
        MistralTokenizer(tmp_path)
