"""Vision models with random weights, made by transformers' own classes, and what those answer; needs torch.

`python -m tests.checkpoints.vision DIRECTORY` writes them and their answers, which are in tests/golden/engines/vision/.
OpenVINO's form of them lies there too: optimum-intel 2.2 made it, of Qwen2-VL with transformers 4.57 and `rope_scaling`
in the configuration as that reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from handler.core.media import Medium
from handler.engines.huggingface.media import pillow_image
from tests.random_models import Answer, Case, byte_tokenizer, cases, greedy_answer, save

_PARTS = """{%- for message in messages -%}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] -%}
{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN = [*_SPECIAL, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_LLAVA = [*_SPECIAL, "<image>"]

FAMILIES = {"qwen2_vl": 8, "llava": 22}
"""Each with a seed whose weights have the gap."""


def picture(width: int, height: int, seed: int) -> Medium:
    """Coarse random squares, which survive resizing."""
    import numpy

    rng = numpy.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 14, width // 14, 3), dtype=numpy.uint8)
    pixels = coarse.repeat(14, axis=0).repeat(14, axis=1).tobytes()
    return Medium("image", (width, height), pixels, sha256(f"{width}x{height}".encode() + pixels).hexdigest())


_PICTURES = (picture(56, 84, 1), picture(84, 56, 2), picture(84, 56, 3))
CASES = cases(*_PICTURES)
"""The last two of the pictures are of one size."""


def write_model(directory: Path, family: str, seed: int | None = None) -> Path:
    """Write a Hugging Face directory of one of FAMILIES."""
    import torch

    tokenizer = byte_tokenizer(_QWEN if family == "qwen2_vl" else _LLAVA)
    model, processor = (_qwen if family == "qwen2_vl" else _llava)(tokenizer)
    torch.manual_seed(FAMILIES[family] if seed is None else seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "class_embedding" in name:
                weight.normal_()
            if weight.dim() > 1:  # wide enough that images and words matter
                weight.normal_(0, 0.7 / weight[0].numel() ** 0.5)
            if "embed_tokens" in name:
                weight.normal_(0, 0.8)
            if name == "lm_head.weight":
                weight.normal_(0, 0.8)
    save(model, tokenizer, directory, _published)
    processor.save_pretrained(directory)
    processor.image_processor.save_pretrained(directory)  # in the file that OpenVINO GenAI reads
    return directory


def _published(name: str) -> str:
    """Return a weight's name as LLaVA's authors have it."""
    own = "vision_tower.vision_model."
    return name if own in name else name.replace("vision_tower.", own)


class Reference:
    """transformers in fp32."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        torch.set_num_threads(2)
        self._torch = torch
        self._model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        self._processor = AutoProcessor.from_pretrained(model)

    def answer(self, case: Case) -> Answer:
        text = self._processor.apply_chat_template(list(case.messages), tokenize=False, add_generation_prompt=True)
        given = [pillow_image(image) for image in case.media]
        inputs = dict(self._processor(text=[text], images=given or None, return_tensors="pt"))
        return greedy_answer(inputs.pop("input_ids"), lambda ids: self._logits(ids, inputs))

    def _logits(self, ids: Any, inputs: Mapping[str, Any]) -> Any:
        """Compute all anew: `generate` keeps the last image's positions in the model (transformers 5.19, Qwen2-VL)."""
        more = {**inputs, "attention_mask": self._torch.ones_like(ids)}
        if (types := more.get("mm_token_type_ids")) is not None:
            text = self._torch.zeros(1, ids.shape[1] - types.shape[1], dtype=types.dtype)
            more["mm_token_type_ids"] = self._torch.cat([types, text], 1)
        with self._torch.no_grad():
            return self._model(input_ids=ids, use_cache=False, **more).logits[0, -1]


def _qwen(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    ids = dict(zip(_QWEN, tokenizer.convert_tokens_to_ids(_QWEN), strict=True))
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "tie_word_embeddings": False,
        },
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(),
        tokenizer,
        Qwen2VLVideoProcessor(),
        chat_template=_PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return Qwen2VLForConditionalGeneration(config), processor


def _llava(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=84,
            patch_size=14,
            projection_dim=64,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
        ),
        image_token_id=image_token,
        image_token_index=image_token,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 84}, crop_size={"height": 84, "width": 84}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_PARTS.replace("IMAGE", "<image>"),
    )
    return LlavaForConditionalGeneration(config), processor


def main(directory: Path) -> None:
    answers = {}
    for family in FAMILIES:
        reference = Reference(write_model(directory / family, family))
        answers[family] = [reference.answer(case)._asdict() for case in CASES]
    (directory / "answers.json").write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
