"""The tokenizers of GGUF files, and the directories that are made of them. All expected tokens are llama.cpp's own."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import eos_ids, load_tokenizer
from handler.engines.llamacpp.files import model_directory
from handler.engines.llamacpp.splits import WORDS
from tests.checkpoints.gguf_header import byte_level, header, sentence_piece, write_header


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))


def made(path: Path, values: dict[str, Any]) -> Path:
    return model_directory(write_header(path / "model.gguf", values))


def tokens(directory: Path, text: str, *, special: bool = False) -> list[str]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [str(tokenizer.id_to_token(id)) for id in tokenizer.encode(text, add_special_tokens=special).ids]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "hello world", "hello Ġwor ld"),
        ("gpt-2", "hell o  hello", "hell Ġ o Ġ Ġ hello"),
        ("gpt-2", "121", "12 1"),
        ("smollm", "121", "1 2 1"),
        ("llama-bpe", "1212", "12 1 2"),
        ("llama-bpe", "a\n\nb", "a ĊĊ b"),
        ("falcon", "1212", "12 1 2"),
        ("gpt-2", "a\n\nb", "a Ċ Ċ b"),
        ("gpt-2", "a<|im_end|>b<tool>", "a <|im_end|> b <tool>"),
        ("gpt-2", "a <|im_end|> b", "a Ġ <|im_end|> Ġ b"),
    ],
)
def test_words_are_divided_as_the_header_says(tmp_path: Path, pre: str, text: str, expected: str) -> None:
    assert tokens(made(tmp_path, byte_level(pre)), text) == expected.split()


def test_words_are_divided_at_spaces_alone_and_in_lower_case(tmp_path: Path) -> None:
    directory = made(tmp_path, byte_level("default", model="whitespace"))
    assert tokens(directory, "HELLO \n12hello") == ["hello", "12", "hello"]


def test_a_letter_that_is_no_token_has_no_id(tmp_path: Path) -> None:
    whole: dict[str, Any] = byte_level()
    known = [text for text in whole["tokens"] if text not in "x-"]
    directory = made(tmp_path, {**whole, "tokens": known, "token_type": whole["token_type"][2:]})
    assert tokens(directory, "12xx-12x") == ["12", "12"]


@pytest.mark.parametrize("pre", WORDS)
def test_each_name_of_a_pre_tokenizer_gives_a_tokenizer_that_loses_nothing(tmp_path: Path, pre: str) -> None:
    if pre == "whitespace":
        pytest.skip("removes spaces")
    tokenizer = Tokenizer.from_file(str(made(tmp_path, byte_level(pre)) / "tokenizer.json"))
    text = "Hello  WORLD's 1234567 x\n\n\t é日本۱۲"
    if WORDS[pre].spaces:
        text = "hello"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "▁ abc"),
        ("cabc", "▁ c abc"),
        ("a<tool>a", "▁a <tool> ▁a"),
        ("aaaa", "▁a aaa"),
        ("aab  ab", "▁a ab ▁ ▁ab"),
        ("é", "▁ <0xC3> <0xA9>"),
        ("", ""),
    ],
)
def test_sentence_pieces_are_merged_by_score(tmp_path: Path, text: str, expected: str) -> None:
    assert tokens(made(tmp_path, sentence_piece()), text) == expected.split()


def test_special_tokens_are_added_as_the_header_says(tmp_path: Path) -> None:
    assert tokens(made(tmp_path, sentence_piece()), "a", special=True) == ["<s>", "▁a"]
    values = sentence_piece(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    assert tokens(made(tmp_path, values), "a", special=True) == ["a", "</s>"]


@pytest.mark.parametrize(
    ("pre", "model", "expected"),
    [
        ("gemma4", "gpt2", ["<|im_start|>", "a"]),
        ("gpt-2", "gemma4", ["<|im_start|>", "a"]),
        ("sarvam-moe", "gpt2", ["a"]),
    ],
)
def test_gemma_begins_with_bos_even_if_the_header_denies_it(
    tmp_path: Path, pre: str, model: str, expected: list[str]
) -> None:
    values = byte_level(pre, model=model, add_bos_token=False)
    assert tokens(made(tmp_path, values), "a", special=True) == expected


@pytest.mark.parametrize(
    ("pre", "values", "expected"),
    [
        ("gpt-2", {}, "a Ġ <mask> Ġ [MASK] Ġ </s> Ġ <unk> Ġ b"),
        ("jina-v2-es", {}, "a <mask> Ġ [MASK] Ġ </s> Ġ <unk> Ġ b"),
        ("gpt-2", {"general.architecture": "jina-bert-v3"}, "a <mask> Ġ [MASK] Ġ </s> Ġ <unk> Ġ b"),
        ("gpt-2", {"general.name": "A Modern-BERT"}, "a Ġ <mask> [MASK] Ġ </s> Ġ <unk> Ġ b"),
        ("gpt-2", {"general.name": "Phi-3 mini"}, "a Ġ <mask> [MASK] </s> <unk> Ġ b"),
    ],
)
def test_some_tokens_take_spaces_as_the_model_is_called(
    tmp_path: Path, pre: str, values: dict[str, Any], expected: str
) -> None:
    whole: dict[str, Any] = byte_level(pre)
    marks = ["<mask>", "[MASK]", "</s>", "<unk>"]
    more = {"tokens": [*whole["tokens"][:-3], *marks], "token_type": [*whole["token_type"][:-3], 3, 3, 1, 2]}
    assert tokens(made(tmp_path, {**whole, **more, **values}), "a <mask> [MASK] </s> <unk> b") == expected.split()


def test_the_engine_reads_the_directory(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    values = {**byte_level(), "tokenizer.chat_template": template, "llama.context_length": 77}
    config = EngineConfig(model=made(tmp_path, values))
    tokenizer = load_tokenizer(config)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert prompt.text == "<|im_start|>hello<|im_end|>"
    assert list(prompt.ids) == [268, 259, 269]
    vocabulary = tokenizer.vocabulary
    assert [vocabulary.pieces[id] for id in (0, 254, 264, 270)] == [b"!", b"\xa0", b"ld", b"<tool>"]
    assert vocabulary.special == {268, 269}
    assert eos_ids(config) == {269}
    assert json.loads((config.model_path / "config.json").read_text())["max_position_embeddings"] == 77


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            byte_level("strange"),
            r"how its tokenizer divides texts \(tokenizer\.ggml\.pre is 'strange'\): put tokenizer",
        ),
        (byte_level(model="rwkv"), r"its kind of tokenizer \(tokenizer\.ggml\.model is 'rwkv', not one of gpt2, "),
        (byte_level(tokens=[b"\xff"]), "token 0 in its vocabulary is not valid UTF-8: put"),
        (byte_level(tokens=["a", "b", "a"]), "tokens 0 and 2 in its vocabulary have the same text 'a'"),
        (byte_level(tokens=[]), "the file contains no tokenizer"),
        (byte_level(tokens=[1, 2]), r"tokenizer\.ggml\.tokens is a list of another type"),
        (byte_level(token_type=[1]), r"tokenizer\.ggml\.token_type has 1 of 271 tokens"),
        (byte_level(merges=["h x"]), "its vocabulary does not contain all of 'h', 'x' and 'hx'"),
        (sentence_piece(tokens=["a"], token_type=[1], scores=[0.0]), "its vocabulary has no token <0x00>"),
        ({**byte_level(), "general.type": "adapter"}, r"extends a model \(adapter\)"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        made(tmp_path, values)
    assert str(refused.value).count("model.gguf") == 1
    assert not list((tmp_path / "cache" / "converted").glob("*/")), "nothing is left"


def test_a_tokenizer_beside_the_file_stands_in_for_one_that_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert made(tmp_path, byte_level("strange")) == tmp_path
    (tmp_path / "model.gguf").unlink()
    assert made(tmp_path, byte_level()) != tmp_path
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="ends inside its header"):
        model_directory(tmp_path / "model.gguf")


def test_a_list_that_is_longer_than_any_vocabulary_is_not_read(tmp_path: Path) -> None:
    data = bytearray(header({"tokenizer.ggml.tokens": ["a"]}))
    data[-17:-9] = struct.pack("<Q", 1 << 30)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="a list in its header has 1,073,741,824 items"):
        model_directory(path)


def test_a_chat_begins_with_the_token_that_llama_cpp_adds(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "a"}]
    for given in (template, "{{ bos_token }}" + template, "<s>" + template):
        directory = made(tmp_path, sentence_piece(**{"tokenizer.chat_template": given}))
        prompt = load_tokenizer(EngineConfig(model=directory)).encode_chat(chat)
        assert prompt.text == "<s>a"
        assert next(iter(prompt.ids)) == 1
        (tmp_path / "model.gguf").unlink()
    directory = made(tmp_path, sentence_piece(add_bos_token=False, **{"tokenizer.chat_template": template}))
    assert load_tokenizer(EngineConfig(model=directory)).encode_chat(chat).text == "a"


def test_a_template_for_tools_is_kept_beside_the_default(tmp_path: Path) -> None:
    values = byte_level(**{"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with {{ tools }}"})
    tokenizer = load_tokenizer(EngineConfig(model=made(tmp_path, values)))
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.encode_chat(chat).text == "plain"
    assert tokenizer.encode_chat(chat, [{"type": "function"}]).text.startswith("with [")


WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁he", "llo", "▁", "w", "▁.", "▁中", "▁e"]


def word_piece(**more: Any) -> dict[str, Any]:
    kinds = [3, 3, 3, 3, *[1] * (len(WORD_PIECES) - 4)]
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0}
    return {"model": "bert", "tokens": WORD_PIECES, "token_type": kinds, **ids, **more}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HELLO hello.", "▁he llo ▁he llo ▁."),
        ("hello, w", "▁he llo [UNK] ▁ w"),
        ("é中e", "▁e ▁中 ▁e"),
        ("he[SEP]he\u200bllo", "▁he [SEP] ▁he llo"),
        ("hellox", "[UNK]"),
    ],
)
def test_word_pieces(tmp_path: Path, text: str, expected: str) -> None:
    directory = made(tmp_path, word_piece())
    assert tokens(directory, text) == expected.split()
    assert tokens(directory, text, special=True) == ["[CLS]", *expected.split(), "[SEP]"]


def test_word_pieces_may_keep_case_and_accents(tmp_path: Path) -> None:
    directory = made(tmp_path, word_piece(**{"tokenizer.ggml.normalizer.lowercase": False}))
    assert tokens(directory, "HELLO he é") == ["[UNK]", "▁he", "[UNK]"]


PIECES = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -2.0, "▁a": -3.0, "a": -4.0, "ab": -3.0, "b": -5.0, "▁ab": -9.0}


def unigram(**more: Any) -> dict[str, Any]:
    kinds = [3, 3, 2, *[1] * (len(PIECES) - 3)]
    return {"model": "t5", "tokens": [*PIECES], "scores": [*PIECES.values()], "token_type": kinds, **more}


@pytest.mark.parametrize(
    ("text", "plain", "merged"),
    [
        ("ab", "ab", "▁ ab"),
        (" a  b ", "▁a ▁ ▁ b ▁", "▁a ▁ b"),
        ("xyab", "<unk> ab", "▁ <unk> ab"),
        ("a</s>b", "a </s> b", "▁a </s> ▁ b"),
    ],
)
def test_unigrams_are_chosen_by_their_sum(tmp_path: Path, text: str, plain: str, merged: str) -> None:
    assert tokens(made(tmp_path, unigram()), text, special=True) == [*plain.split(), "</s>"]
    (tmp_path / "model.gguf").unlink()
    spaces = unigram(add_space_prefix=True, remove_extra_whitespaces=True, add_eos_token=False)
    assert tokens(made(tmp_path, spaces), text, special=True) == merged.split()


def test_the_directory_is_made_once_and_may_lie_beside_the_file(tmp_path: Path) -> None:
    path = write_header(tmp_path / "model.gguf", byte_level())
    first = model_directory(path)
    (first / "tokenizer.json").write_text("changed")
    assert model_directory(path) == first
    assert (first / "tokenizer.json").read_text() == "changed"
    beside = tmp_path / "converted" / first.name
    beside.mkdir(parents=True)
    assert model_directory(path) == beside


def test_a_table_at_which_the_tokenizer_panics_is_a_tokenizer_that_is_not_supported(tmp_path: Path) -> None:
    values = {**sentence_piece(), "model": "t5", "precompiled_charsmap": [1, 2, 3]}
    with pytest.raises(ConfigError, match=r"model\.gguf: its tokenizer cannot be loaded .*put tokenizer\.json"):
        made(tmp_path, values)


def test_a_cache_that_cannot_be_written_is_not_said_to_be_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no directory")
    with pytest.raises(
        ConfigError, match=r"^cannot write the tokenizer of .*model\.gguf: .*; set LMI_CACHE to another directory$"
    ):
        made(tmp_path, byte_level())
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"^cannot read .*gone\.gguf: "):
        model_directory(tmp_path / "gone.gguf")
