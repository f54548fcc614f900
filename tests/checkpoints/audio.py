"""A chat model with audio and random weights, made by transformers' own classes, and what it answers; needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from handler.core.media import SAMPLE_RATE, Medium
from tests.random_models import Answer, Case, byte_tokenizer, cases, greedy_answer, save

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


_CLIPS = (clip(1.0, 1), clip(1.0, 2), clip(2.37, 3))
CASES = cases(*_CLIPS)
"""The first two of the clips are of one length."""


def write_model(directory: Path, seed: int = SEED) -> Path:
    """Write a Hugging Face directory of a Qwen2-Audio."""
    import torch
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = byte_tokenizer(_SPECIAL)
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
    save(model, tokenizer, directory, lambda name: name.replace(".model.model.", ".model."))
    extractor = WhisperFeatureExtractor(feature_size=128)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=_TEMPLATE).save_pretrained(directory)
    return directory


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
        given = [numpy.frombuffer(clip.data, numpy.float32) for clip in case.media]
        inputs = dict(self._processor(text=[text], audio=given or None, return_tensors="pt", sampling_rate=SAMPLE_RATE))
        return greedy_answer(inputs.pop("input_ids"), lambda ids: self._logits(ids, inputs))

    def _logits(self, ids: Any, inputs: Mapping[str, Any]) -> Any:
        more = {**inputs, "attention_mask": self._torch.ones_like(ids)}
        with self._torch.no_grad():
            return self._model(input_ids=ids, use_cache=False, **more).logits[0, -1]
