"""A directory of a model's shape without its weights: read as what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from handler.config import model_files
from handler.engines.huggingface.tokenizer import HfTokenizer
from proof.compare import dummy_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model directory with a byte-level tokenizer of 261 tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: id for id, letter in enumerate(letters, 2)}}
    vocabulary |= {"th": 258, "the": 259, "\u0120the": 260}
    tokenizer = Tokenizer(BPE(vocabulary, [("t", "h"), ("th", "e"), ("\u0120", "the")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    directory = tmp_path / "source"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (directory / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}))
    return directory


def test_every_id_of_the_shape_is_a_token(source: Path, tmp_path: Path) -> None:
    shape = {**dummy_model.SHAPES["tiny"], "vocab_size": 300}
    target = tmp_path / "made"
    dummy_model.write(shape, source, target)
    assert model_files.locate(str(target)).kind == "huggingface"
    config = json.loads((target / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["model_type"]) == (300, 1, "llama")
    assert "pad_token_id" not in config
    ours, theirs = HfTokenizer(target), HfTokenizer(source)
    assert ours.encode("the end of the").ids == theirs.encode("the end of the").ids
    assert 260 in ours.encode("of the").ids
    assert ours.vocabulary is not None
    texts = [ours.vocabulary.text(id) for id in range(300)]
    assert texts[299] == " filler299"
    assert all(texts)
    with pytest.raises(SystemExit, match="261 tokens, the shape 200"):
        dummy_model.write({**shape, "vocab_size": 200}, source, target)
