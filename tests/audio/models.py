"""A chat model with audio and random weights, made by transformers' own classes, and what it answers; needs torch.

Tests compare greedy tokens. Two engines never compute the same last bits, so weights and clips are such that the first
two logits differ by at least `GAP` at each position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.media import SAMPLE_RATE, MediaSource, Medium
from handler.core.values import Request, Sampling
from handler.serving.media.placing import place_media
from tests.process.engines.test_conformance import Driver, ids
from tests.vision.models import GAP, NUM_TOKENS, Answer

_TEMPLATE = """{%- for message in messages -%}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] -%}
{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
SEED = 4
"""Of weights that have the gap."""


def clip(seconds: float, seed: int) -> Medium:
    """Random tones, one after another."""
    import numpy

    rng = numpy.random.default_rng(seed)
    times = numpy.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = rng.uniform(80, 4000, len(times) // 1600 + 1).repeat(1600)[: len(times)]
    wave = (0.5 * numpy.sin(2 * numpy.pi * pitch * times)).astype(numpy.float32).tobytes()
    return Medium("audio", (len(times),), wave, sha256(b"%d " % len(times) + wave).hexdigest())


class Case(NamedTuple):
    """A chat."""

    messages: tuple[Mapping[str, Any], ...]
    clips: tuple[Medium, ...]


def _case(*clips: Medium) -> Case:
    question = {"type": "text", "text": "What is in this image?"}
    return Case(({"role": "user", "content": [*[{"type": "audio"}] * len(clips), question]},), clips)


_CLIPS = (clip(1.0, 1), clip(1.0, 2), clip(2.37, 3))
CASES = (_case(), *map(_case, _CLIPS), _case(*_CLIPS))
"""Without a clip, with one of each, with three; the first two are of one length."""


def write_model(directory: Path, seed: int = SEED) -> Path:
    """Write a Hugging Face directory of a Qwen2-Audio."""
    import torch
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    from tests.vision.models import _tokenizer

    tokenizer = _tokenizer([*_SPECIAL])
    audio = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "d_model": 64}
    text = {
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "max_source_positions": 1500, **sizes},
        text_config=text,
        audio_token_index=audio,
        audio_token_id=audio,
    )
    torch.manual_seed(seed)
    model = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed_positions" not in name:  # wide enough that clips and words matter
                weight.normal_(
                    0, 0.8 if "embed_tokens" in name or "lm_head" in name else 0.7 / weight[0].numel() ** 0.5
                )
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.float().save_pretrained(directory)
    _name_as_published(directory / "model.safetensors")
    extractor = WhisperFeatureExtractor(feature_size=128)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=_TEMPLATE).save_pretrained(directory)
    return directory


def _name_as_published(file: Path) -> None:
    """Name weights as the published Qwen2-Audio has them; transformers 5 reads both, and vLLM 0.32 only these."""
    from safetensors.torch import load_file, save_file

    weights = {name.replace(".model.model.", ".model."): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


class Reference:
    """transformers in fp32."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

        torch.set_num_threads(2)
        self._torch = torch
        self._model = Qwen2AudioForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
        self._processor = AutoProcessor.from_pretrained(model)

    def answer(self, case: Case) -> Answer:
        import numpy

        text = self._processor.apply_chat_template(list(case.messages), tokenize=False, add_generation_prompt=True)
        given = [numpy.frombuffer(clip.data, numpy.float32) for clip in case.clips]
        inputs = dict(self._processor(text=[text], audio=given or None, return_tensors="pt", sampling_rate=SAMPLE_RATE))
        found, found_ids, gaps = inputs.pop("input_ids"), [], []
        for _ in range(NUM_TOKENS):
            more = {**inputs, "attention_mask": self._torch.ones_like(found)}
            with self._torch.no_grad():
                best = self._model(input_ids=found, use_cache=False, **more).logits[0, -1].topk(2)
            found_ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            found = self._torch.cat([found, best.indices[:1][None]], 1)
        return Answer(found.shape[1] - NUM_TOKENS, found_ids, min(gaps))


class Hearing:
    """An engine with such a model, and what transformers answers to each of CASES."""

    def __init__(self, driver: Driver, answers: Sequence[Answer]) -> None:
        self.driver = driver
        self._answers = answers
        assert min(answer.gap for answer in answers) >= GAP

    def check(self, cases: Sequence[Case]) -> None:
        """Submit all at once, and compare."""
        started = [(case, self._submit(case)) for case in cases]
        found = self.driver.run()
        for case, id in started:
            assert ids(found[id]) == self.expected(case).ids, found[id][-1].error

    def expected(self, case: Case) -> Answer:
        return self._answers[CASES.index(case)]

    def _submit(self, case: Case) -> int:
        request = Request(
            "",
            Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True),
            messages=case.messages,
            media=tuple(MediaSource("audio", b"", "", f"clip {number}") for number, _ in enumerate(case.clips)),
        )
        tokenizer = self.driver.tokenizer
        prompt = tokenizer.encode_chat(case.messages)
        if case.clips:
            prompt = place_media(request, prompt, case.clips, tokenizer.media_tokens)
        assert len(prompt.ids) == self.expected(case).num_prompt
        return self.driver.batcher.submit(request, prompt)
