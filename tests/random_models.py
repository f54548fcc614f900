"""Shared parts of tests of models with random weights, whatever media these take: cases, tokens, the comparison.

Tests compare greedy tokens. Two engines never compute the same last bits, so weights and media are such that the first
two logits differ by at least `GAP` at each position.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.media import MediaSource, Medium
from handler.core.values import Request, Sampling
from handler.serving.media.loader import place_media
from tests.process.engines.test_conformance import Driver, ids

GAP = 0.1
NUM_TOKENS = 8

_QUESTION = {"type": "text", "text": "What is in this image?"}


class Case(NamedTuple):
    """A chat."""

    messages: tuple[Mapping[str, Any], ...]
    media: tuple[Medium, ...]


class Answer(NamedTuple):
    """Number of the prompt's tokens, greedy ids, and the least difference of the first two logits."""

    num_prompt: int
    ids: list[int]
    gap: float


def unpack(archive: Path, directory: Path) -> None:
    """Unpack a model's files. Debian 12's Python has no filter of members; later ones warn where none is set."""
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)
        files.extractall(directory)


def case(*media: Medium) -> Case:
    content = [*({"type": medium.kind} for medium in media), _QUESTION]
    return Case(({"role": "user", "content": content},), media)


def cases(*media: Medium) -> tuple[Case, ...]:
    """Without a medium, with one of each, with all."""
    return (case(), *map(case, media), case(*media))


def greedy_answer(ids: Any, logits: Callable[[Any], Any]) -> Answer:
    """Choose the best token again and again.

    Args:
        ids: the prompt's, as torch's tensor of one row.
        logits: compute those of the next token.
    """
    import torch

    found, gaps = [], []
    for _ in range(NUM_TOKENS):
        best = logits(ids).topk(2)
        found.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[:1][None]], 1)
    return Answer(ids.shape[1] - NUM_TOKENS, found, min(gaps))


class Compared:
    """An engine with such a model, and what transformers answers to each of the cases."""

    def __init__(self, driver: Driver, cases: Sequence[Case], answers: Sequence[Answer]) -> None:
        self.driver = driver
        self._cases, self._answers = cases, answers
        assert min(answer.gap for answer in answers) >= GAP

    def check(self, cases: Sequence[Case]) -> None:
        """Submit all at once, and compare."""
        started = [(case, self.submit(case)) for case in cases]
        found = self.driver.run()
        for case, id in started:
            assert ids(found[id]) == self.expected(case).ids, found[id][-1].error

    def submit(self, case: Case) -> int:
        sources = [MediaSource(medium.kind, b"", "", f"{medium.kind} {n}") for n, medium in enumerate(case.media)]
        sampling = Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        request = Request("", sampling, messages=case.messages, media=tuple(sources))
        tokenizer = self.driver.tokenizer
        prompt = tokenizer.encode_chat(case.messages)
        if case.media:
            prompt = place_media(request, prompt, case.media, tokenizer.media_tokens)
        assert len(prompt.ids) == self.expected(case).num_prompt
        return self.driver.batcher.submit(request, prompt)

    def expected(self, case: Case) -> Answer:
        return self._answers[self._cases.index(case)]


def byte_tokenizer(special: Sequence[str]) -> Any:
    """Train a tokenizer of transformers' on a few words; needs transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["What is in this image? a user an assistant"] * 3, trainer)
    tokenizer.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def save(model: Any, tokenizer: Any, directory: Path, name: Callable[[str], str]) -> None:
    """Write a model.

    Args:
        name: of a weight in the published model; transformers 5 reads both, and vLLM 0.32 only these.
    """
    from safetensors.torch import load_file, save_file

    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.float().save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file({name(given): weight for given, weight in load_file(file).items()}, file, {"format": "pt"})
