"""Make smollm2_f32_greedy.json: the demo model's greedy answers to 24 prompts, by transformers in float32.

    python3 -m venv v
    v/bin/pip install torch==2.15.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0 openvino-genai==2026.4.1.0
    v/bin/python tests/golden/engines/make_smollm2_f32_greedy.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Those are the versions the file was made with. The prompts' ids come from OpenVINO's tokenizer: transformers' conversion
of the GGUF's own loses the splitting of digits.

`exact` is the answer of the file's weights, which OpenVINO GenAI's own GGUF reader would round. Its `ids` end with
<|im_end|> where the model stopped by itself. `logprobs` are raw (no temperature, no penalties), one per id. `margin` is
the smallest lead of a chosen token over the runner-up: an engine whose log-probs err by less than half of it must
choose the same tokens.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import openvino_genai
import torch
from transformers import AutoModelForCausalLM

EOS = 2
NEW_TOKENS = 32
USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
RIVER = (
    "The river runs past the mill, under the old stone bridge and out to the sea, "
    "and nobody in the village remembers why. "
)
PROMPTS = [
    "The capital of France is",
    "Hello",
    "\n",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "import json\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "Ada", "born": 1815, "languages": [',
    "1, 2, 3, 4, 5, 6, 7,",
    "12345 + 67890 =",
    "3.14159265358979",
    "The year 2024 has 366 days and the year 2023 has",
    "Le café était fermé, alors nous",
    "Straße, Größe, Übermut: drei deutsche Wörter mit",
    "日本の首都は",
    "Москва — столица",
    "🎉🎂 Happy birthday 😀 to",
    "👩‍👩‍👧‍👦 e\u0301 ﷽ \u200b¿",
    f"{USER}What is the capital of France?{ASSISTANT}",
    f"{SYSTEM}{USER}Say hi{ASSISTANT}",
    f"{USER}Write a Python function that reverses a string.{ASSISTANT}",
    f"{SYSTEM}{USER}Name three colours.{ASSISTANT}Red, green and blue.<|im_end|>\n{USER}And 2 more? 🎨{ASSISTANT}",
    RIVER * 24,
]


def complete(model: torch.nn.Module, prompt_ids: list[int]) -> dict[str, object]:
    """Take the likeliest token until eos, one forward pass a token with the KV cache, and note each one's log-prob."""
    ids: list[int] = []
    logprobs: list[float] = []
    margin, cache, fed = float("inf"), None, prompt_ids
    while len(ids) < NEW_TOKENS and EOS not in ids:
        out = model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
        top = torch.log_softmax(out.logits[0, -1].float(), dim=-1).topk(2)
        ids.append(int(top.indices[0]))
        logprobs.append(round(float(top.values[0]), 6))
        margin = min(margin, float(top.values[0] - top.values[1]))
        cache, fed = out.past_key_values, ids[-1:]
    return {"ids": ids, "logprobs": logprobs, "margin": round(margin, 6)}


def main(path: Path) -> None:
    tokenizer = openvino_genai.Tokenizer(str(path))
    ids = [[int(token) for token in tokenizer.encode(prompt).input_ids.data[0]] for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        exact = [complete(model, prompt_ids) for prompt_ids in ids]
    packages = ("torch", "transformers", "gguf", "openvino-genai")
    head = {"model": path.name, "versions": {name: version(name) for name in packages}, "eos": EOS}
    fields = ("prompt", "prompt_ids", "exact")
    cases = [dict(zip(fields, case, strict=True)) for case in zip(PROMPTS, ids, exact, strict=True)]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    text = json.dumps(head, separators=(",", ":"))[:-1] + ',"cases":[\n' + lines + "\n]}\n"
    Path(__file__).with_name("smollm2_f32_greedy.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
