"""Texts with too many tokens are refused before a tokenizer is busy with them for long."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from handler.core.errors import PromptTooLong
from handler.core.text import Vocabulary, check_tokens
from handler.engines.echo.engine import CONTEXT, EchoTokenizer
from handler.engines.huggingface import tokenizer as hf_tokenizer
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.openvino import model as openvino_model
from handler.engines.openvino.model import OpenVinoTokenizer, prepare_model


def test_parts_are_counted_as_far_as_they_fit() -> None:
    counted: list[int] = []

    def count(part: str) -> int:
        counted.append(len(part))
        return len(part)

    check_tokens("a" * 100, "inputs", 10, 100, count)
    assert counted == [], "a short one is left to the tokenizer"
    check_tokens("a" * 250, "inputs", 250, 100, count)
    assert counted == [100, 100, 50]
    counted.clear()
    with pytest.raises(PromptTooLong, match="'messages' has at least 252 tokens; the model takes at most 250"):
        check_tokens("a" * 100_000, "messages", 250, 100, count)
    assert counted == [100, 100, 100], "84 of each are certain, whatever the cuts have added"


class Recorder:
    """A tokenizer, and how much it was given at a time."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.sizes: list[int] = []

    def encode(self, text: str, **more: Any) -> Any:
        self.sizes.append(len(text))
        return self._real.encode(text, **more)


@pytest.mark.model
def test_openvinos_gets_no_long_text_with_too_many_tokens(demo_model: Path) -> None:
    """It holds the GIL: 0.7 s for half a megabyte of one letter."""
    tokenizer = OpenVinoTokenizer(prepare_model(str(demo_model), "auto"))
    recorder = tokenizer._tokenizer = Recorder(tokenizer._tokenizer)
    with pytest.raises(PromptTooLong, match=r"'inputs' has at least .* at most 8191"):
        tokenizer.encode("a" * 500_000)
    assert set(recorder.sizes) == {openvino_model._PART}
    recorder.sizes.clear()
    assert len(tokenizer.encode("hello " * 8000).ids) == 8001
    assert max(recorder.sizes) == 48_000, "one that fits is given to it whole"


@pytest.fixture
def hugging_faces() -> HfTokenizer:
    fast = Tokenizer(WordLevel({"hello": 0, "?": 1}, unk_token="?"))
    fast.pre_tokenizer = Whitespace()
    tokenizer = HfTokenizer.__new__(HfTokenizer)
    tokenizer._fast, tokenizer._vocabulary = fast, Vocabulary([b"hello", b"?"])
    return tokenizer


def test_hugging_faces_lets_other_threads_run(hugging_faces: HfTokenizer) -> None:
    """No thread is made to let go of the GIL here: the other one counts only while the tokenizer does not hold it."""
    counted, ended = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not ended.is_set():
            counted += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        before = counted
        hugging_faces.encode("hello " * 100_000)
        found = counted - before
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert found > 10


def test_hugging_faces_makes_no_more_ids_than_any_engine_takes(
    hugging_faces: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = hugging_faces
    monkeypatch.setattr(hf_tokenizer, "PART", 1000)
    monkeypatch.setattr(hf_tokenizer, "MOST_TOKENS", 5000)
    with pytest.raises(PromptTooLong, match=r"'inputs' has at least .* at most 5000"):
        tokenizer.encode("hello " * 8000)
    assert len(tokenizer.encode("hello " * 4000).ids) == 4000


def test_echo_stops_at_its_context() -> None:
    assert len(EchoTokenizer().encode("a " * CONTEXT).ids) == CONTEXT
    with pytest.raises(PromptTooLong, match=f"'inputs' has at least {CONTEXT + 1} tokens"):
        EchoTokenizer().encode("a " * (CONTEXT + 2))
    with pytest.raises(PromptTooLong, match="'messages' has"):
        EchoTokenizer().encode_chat([{"role": "user", "content": "a " * (CONTEXT + 2)}])
