"""A Hugging Face model directory without weights: a tokenizer of a thousand ids, and what says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<unk>", "<s>", "<|im_start|>", "<|im_end|>", "<|end|>")
EOS = (3, 4)  # two of them, as large models have
CONTEXT = 2048  # tokens
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_PARTS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TEXT = (
    "Once upon a time there was a little town by the sea, and the people of the town told one another stories.\n"
    "The capital of France is Paris; the capital of Italy is Rome. def add(a, b): return a + b, if x == 1: print(x).\n"
    "Grüße aus Köln, œuvres d'été à Noël. 日本語の文章もあります。Привет, мир! 😀 is an emoji that means joy 🎉.\n"
)


def make(directory: Path, *, vision: bool = False) -> Path:
    """The same files each time; with `vision` those of a Qwen2-VL."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[*SPECIAL, *VISION] if vision else list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": EOS[0],
    }
    if vision:
        config |= {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
            "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
        }
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": list(EOS)})
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[EOS[0]],
            "unk_token": SPECIAL[0],
            "chat_template": _PARTS if vision else _TEMPLATE,
        },
    )
    return directory


def ending_with(model: Path, target: Path, eos: str) -> Path:
    """The same model, with another EOS of its tokenizer's."""
    shutil.copytree(model, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    _write(target / "tokenizer_config.json", {**config, "eos_token": eos})
    return target


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    import sys

    print(make(Path(sys.argv[1])))
