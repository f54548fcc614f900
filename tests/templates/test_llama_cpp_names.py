"""The names that our tables repeat are those in llama.cpp's source: architectures, texts of tokens, and flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from handler.config import gguf
from handler.engines.llamacpp import child, readable, splits, vocabulary

NOT_SERVED = {
    *("(unknown)", "clip"),
    *("dflash", "eagle3", "gemma4-assistant"),  # drafts
    *("dream", "llada", "llada-moe", "rnd1"),  # diffusion
    *("pockettts", "qwen3tts", "wavtokenizer-dec"),  # speech
    *("t5", "t5encoder"),
}


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest) -> Path:
    directory = request.config.getoption("--templates")
    assert directory, "make test-templates gives --templates"
    return Path(directory) / "llama.cpp"


def code(path: Path) -> str:
    return re.sub(r"//[^\n]*", "", path.read_text())


def test_each_architecture_is_served_or_not_on_purpose(sources: Path) -> None:
    declared = set(re.findall(r'\{ LLM_ARCH_\w+,\s*"([^"]+)"', code(sources / "llama-arch.cpp")))
    assert declared - NOT_SERVED == readable.ARCHITECTURES
    assert declared >= NOT_SERVED


def test_texts_of_tokens_mean_the_same(sources: Path) -> None:
    vocab = code(sources / "llama-vocab.cpp")
    blocks = re.findall(r"if \(false\n(.*?)\) \{\s*special_(\w+?)(?:_id)?(?: = t\.second|\.insert)", vocab, re.DOTALL)
    texts = {name: {text.encode() for text in re.findall(r't\.first == "([^"]+)"', block)} for block, name in blocks}
    own = {**gguf.FIM_TEXTS, "eog_ids": gguf.END_TEXTS}
    assert {name: texts[name] for name in own} == own
    assert texts["eot"] | texts["eom"] <= gguf.END_TEXTS
    (shown,) = re.findall(r"if \((.*<\|channel\|>.*)\) \{", vocab)
    assert {text.encode() for text in re.findall('"([^"]+)"', shown)} == vocabulary.SHOWN


def test_tokens_have_the_same_ids_where_the_header_declares_none(sources: Path) -> None:
    kinds = code(sources / "llama-vocab.cpp").split('"no_vocab"', 1)[1].split("unknown tokenizer", 1)[0]
    blocks = re.findall(r"if \((tokenizer_model == .*?)\) \{(.*?)\n {8}\}", kinds, re.DOTALL)
    names = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
    declared = {
        model.encode(): {names.get(name, name): int(id) for name, id in re.findall(r"special_(\w+)_id *= (\d+)", block)}
        for models, block in blocks
        for model in re.findall('"([^"]+)"', models)
    }
    own = gguf.DEFAULT_IDS
    assert {model: declared[model] for model in own} == own
    assert not any(declared[model] for model in {name.encode() for name in vocabulary.MODELS} - own.keys())


def test_each_pre_tokenizer_has_the_same_settings(sources: Path) -> None:
    kinds = code(sources / "llama-vocab.cpp").split("tokenizer_pre.empty()", 1)[1].split("unknown pre-tokenizer", 1)[0]
    blocks = re.findall(r"if \(\s*(tokenizer_pre == .*?)\) \{(.*?)\n {12}\}", kinds, re.DOTALL)
    declared = {
        name: (
            "ignore_merges = true" in block,
            "add_bos = true" in block,
            "special_bos_id = LLAMA_TOKEN_NULL" not in block,
        )
        for names, block in blocks
        for name in re.findall('"([^"]+)"', names)
    }
    own = {name: (words.ignore_merges, words.add_bos, words.has_bos) for name, words in splits.WORDS.items() if name}
    assert declared == own


def test_flags_are_treated_as_their_other_names(sources: Path) -> None:
    found = re.findall(r'^ +\{ *("-[^{}\n]+") *\}', code(sources / "arg.cpp"), re.MULTILINE)
    options = [re.findall('"([^"]+)"', names) for names in found]
    assert len(options) > 300, "they have moved"
    assert {*child.REASONS, *child.PROJECTORS} <= {name for names in options for name in names}
    for names in options:
        treated = {(child.REASONS.get(name), name in child.PROJECTORS) for name in names}
        assert len(treated) == 1, names
