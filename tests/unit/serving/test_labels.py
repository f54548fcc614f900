"""The token ids of labels after a prompt, and the part of a prompt that several questions share."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from handler.core.errors import InvalidParameter
from handler.core.values import FieldNames, Pooling, Request
from handler.engines.echo.engine import EchoTokenizer
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.serving.encoder import Encoder
from tests.unit.engines.test_tokenizer import byte_level, sentence_piece, write

STATE = "The capital of France is Paris.\n"
PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}Answer:"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    at = tmp_path_factory.mktemp("labels")
    plain = HfTokenizer(write(at / "plain", byte_level(), PLAIN))
    kinds = {"byte_level": byte_level(), "sentence_piece": sentence_piece()}
    return {"plain": plain, **{name: HfTokenizer(write(at / name, tokenizer)) for name, tokenizer in kinds.items()}}


def request(question: str, *labels: str, state: str = STATE) -> Request:
    messages = ({"role": "user", "content": f"{state}\n{question}"},)
    pooling = Pooling("labels", labels=labels, suffix=question)
    return Request("", pooling=pooling, messages=messages, names=FieldNames(prompt="questions.q"))


def encode(tokenizer: Any, request: Request) -> tuple[Pooling, list[int]]:
    encoded, prompt = Encoder(tokenizer, lambda: None, None, None).encode(request)
    assert encoded.pooling is not None
    assert encoded.messages == ()
    return encoded.pooling, prompt.ids


@pytest.mark.parametrize("kind", ["byte_level", "plain"])
def test_a_label_is_the_token_that_follows_the_prompt(loaded: dict[str, HfTokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    question = request("Which?", "A", "B", "C")
    pooling, ids = encode(tokenizer, question)
    text = tokenizer.encode_chat(question.messages).text
    for label, id in zip("ABC", pooling.label_ids, strict=True):
        assert tokenizer.encode(text + label).ids == [*ids, id]
    assert len(set(pooling.label_ids)) == 3


def test_labels_of_a_tokenizer_that_adds_a_first_token(loaded: dict[str, HfTokenizer]) -> None:
    tokenizer = loaded["sentence_piece"]
    pooling, _ = encode(tokenizer, request("Which?", "A", "B"))
    assert [tokenizer.vocabulary.pieces[id] for id in pooling.label_ids] == [b"A", b"B"]


def spaced(prefix: str) -> Tokenizer:
    """A tokenizer as Mistral has it, with a token for each label with a space and without.

    Args:
        prefix: where it adds a space: "first" for the beginning of a text, "always" for each of its parts, or "never".
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "A", "B", "▁A", "▁B", "]", ":"]
    merges = [("▁", "A"), ("▁", "B")]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("prefix", ["first", "always", "never"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>A:", "<|im_end|>\\n", ":", "<|im_end|>" + "A " * 40 + ":"])
def test_a_label_after_a_special_token_is_the_token_that_follows_the_prompt(
    tmp_path: Path, prefix: str, end: str
) -> None:
    """Some tokenizers add a space only to the beginning of a text, which the end of a prompt is not."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '" + end + "' }}"
    tokenizer = HfTokenizer(write(tmp_path, spaced(prefix), template))
    question = request("Which?", "A", "B")
    pooling, ids = encode(tokenizer, question)
    text = tokenizer.encode_chat(question.messages).text
    assert [tokenizer.ids(text + label) for label in "AB"] == [[*ids, id] for id in pooling.label_ids]


INSTRUCT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|im_start|>{{ message['content'] }}END"
    "{% else %} {{ message['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
"""As in Mistral's templates, each reply begins with a space."""


@pytest.mark.parametrize("end", ["]", "<|im_end|>"])
@pytest.mark.parametrize("prefix", ["first", "always", "never"])
def test_a_label_begins_with_the_space_that_the_template_writes_before_a_reply(
    tmp_path: Path, prefix: str, end: str
) -> None:
    tokenizer = HfTokenizer(write(tmp_path, spaced(prefix), INSTRUCT.replace("END", end)))
    pooling, _ = encode(tokenizer, request("Which?", "A", "B"))
    assert [tokenizer.vocabulary.pieces[id] for id in pooling.label_ids] == [b" A", b" B"]


def test_labels_have_no_space_if_they_are_not_tokens_with_it(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(write(tmp_path, sentence_piece(), INSTRUCT.replace("END", "]")))
    pooling, _ = encode(tokenizer, request("Which?", "l", "o"))
    assert [tokenizer.vocabulary.pieces[id] for id in pooling.label_ids] == [b"l", b"o"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("A", "Xy"), "questions.q: the label 'Xy' is not a single token of the model"),
        (("A", "B", "A"), "questions.q: the labels 'A' and 'A' are the same token of the model"),
        (("A", ""), "questions.q: the label '' is not a single token of the model"),
    ],
)
def test_labels_that_are_not_single_distinct_tokens_are_refused(
    loaded: dict[str, HfTokenizer], labels: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        encode(loaded["byte_level"], request("Which?", *labels))
    assert refused.value.message == message


def test_a_label_that_changes_the_token_before_it_is_refused(tmp_path: Path) -> None:
    """If `there` is a token, its last letter changes the tokens before it, and so the text that is continued."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %} " + "there"[:-1]
    tokenizer = HfTokenizer(write(tmp_path, byte_level(), template))
    assert len(tokenizer.encode(" there").ids) == 1
    with pytest.raises(InvalidParameter, match="'e' is not a single token"):
        encode(tokenizer, request("Who?", "e"))


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "plain"])
def test_questions_share_the_tokens_of_the_state(loaded: dict[str, HfTokenizer], kind: str) -> None:
    questions = ("Which?", "été 😀?", "Is it Paris?\nyes\nno", "Which? Which?")
    encoded = [encode(loaded[kind], request(question, "A", "B")) for question in questions]
    shared = {tuple(ids[: pooling.num_shared]) for pooling, ids in encoded}
    assert len(shared) == 1
    text = loaded[kind].vocabulary.decode(shared.pop())
    assert text.strip().endswith("Paris.")


def test_a_state_that_quotes_a_question_is_shared_as_a_whole(loaded: dict[str, HfTokenizer]) -> None:
    state = "Which? Which?\n\nWhich?\n"
    pooling, ids = encode(loaded["byte_level"], request("Which?", "A", state=state))
    assert loaded["byte_level"].vocabulary.decode(ids[: pooling.num_shared]).endswith(state + "\n")


def test_nothing_is_shared_if_the_template_changes_the_question(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    pooling, _ = encode(HfTokenizer(write(tmp_path, byte_level(), template)), request("Which?", "A"))
    assert pooling.num_shared == 0


def test_nothing_is_shared_if_the_tokenizer_changes_the_question(tmp_path: Path) -> None:
    """Qwen's tokenizer composes characters. Otherwise the position would depend on the length of the question."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    composing = HfTokenizer(write(tmp_path, tokenizer))
    decomposed = unicodedata.normalize("NFD", "été?")
    assert [
        encode(composing, request(question, "A", state=STATE * 9))[0].num_shared > 0
        for question in ("été?", decomposed)
    ] == [True, False]


def test_each_prompt_of_echo_numbers_its_labels() -> None:
    pooling, ids = encode(EchoTokenizer(), request("Which?", "A", "B"))
    assert pooling.label_ids == (max(ids) + 1, max(ids) + 2)
    assert 0 < pooling.num_shared < len(ids)
