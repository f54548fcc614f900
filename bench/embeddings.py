"""Embeddings a second of `lmi serve` over HTTP and of sentence-transformers in its own process, in turns.

`python bench/embeddings.py --python PYTHON [MODEL]`: PYTHON is one that has sentence-transformers. Without MODEL,
random weights in the shape of all-MiniLM-L6-v2 are made, with a tokenizer of 20,000 words.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WORDS = 20_000
SIZES = {
    "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
    "vocab_size": WORDS + 4, "max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip

_PEER = """
import sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
import json
for line in sys.stdin:
    texts = json.loads(line)
    model.encode(texts, batch_size=len(texts), normalize_embeddings=True)
    print(len(texts), flush=True)
"""


def make_model(directory: Path) -> Path:
    """Write a sentence-transformers directory of a BERT with random weights."""
    import numpy
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    wide, deep = SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (SIZES["vocab_size"], wide),
        "embeddings.position_embeddings.weight": (512, wide),
        "embeddings.token_type_embeddings.weight": (2, wide),
    }
    linear = {"attention.self.query": (wide, wide), "attention.self.key": (wide, wide)}
    linear |= {"attention.self.value": (wide, wide), "attention.output.dense": (wide, wide)}
    linear |= {"intermediate.dense": (deep, wide), "output.dense": (wide, deep)}
    linear = {
        f"encoder.layer.{n}.{name}": size for n in range(SIZES["num_hidden_layers"]) for name, size in linear.items()
    }
    linear["pooler.dense"] = (wide, wide)
    for name, size in linear.items():
        shapes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}  # type: ignore[dict-item]
    norms = [f"{name.removesuffix('.dense')}.LayerNorm" for name in linear if name.endswith("output.dense")]
    draw = numpy.random.default_rng(1).standard_normal
    tensors = {name: (draw(shape) * 0.02).astype(numpy.float32) for name, shape in shapes.items()}
    for name in ["embeddings.LayerNorm", *norms]:
        tensors |= {f"{name}.weight": numpy.ones(wide, numpy.float32), f"{name}.bias": numpy.zeros(wide, numpy.float32)}
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})
    marks = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    words = {f"word{n}": n + 4 for n in range(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(marks | words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    files: dict[str, Any] = {
        "config.json": {"model_type": "bert", "architectures": ["BertModel"], **SIZES},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names},
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": wide, "pooling_mode_mean_tokens": True},
    }
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def texts_of(batch: int, number: int) -> list[str]:
    """Draw a batch of 8 to 60 words a text; the same for both."""
    rng = random.Random(number)
    return [" ".join(f"word{rng.randrange(WORDS)}" for _ in range(rng.randint(8, 60))) for _ in range(batch)]


def served(url: str) -> Callable[[list[str]], None]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), int(address.port or 80), timeout=120)

    def embed(texts: list[str]) -> None:
        body = json.dumps({"model": "model", "input": texts, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        assert len(found["data"]) == len(texts)

    return embed


def peer(process: subprocess.Popen[str]) -> Callable[[list[str]], None]:
    assert process.stdin is not None
    assert process.stdout is not None
    lines, answers = process.stdin, process.stdout

    def embed(texts: list[str]) -> None:
        lines.write(json.dumps(texts) + "\n")
        lines.flush()
        assert answers.readline() == f"{len(texts)}\n", "sentence-transformers ended"

    return embed


def rate(embed: Callable[[list[str]], None], batch: int, seconds: float) -> float:
    """Return texts a second."""
    embed(texts_of(batch, -1))
    count, began = 0, time.monotonic()
    while (took := time.monotonic() - began) < seconds:
        embed(texts_of(batch, count))
        count += 1
    return count * batch / took


def main() -> None:
    from handler.bench.server import lmi_serve

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--python", default=sys.executable, help="a Python with sentence-transformers")
    parser.add_argument("--dtype", default="fp32", help="option.dtype; sentence-transformers computes in fp32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or make_model(Path(scratch))
        other = subprocess.Popen(
            [arguments.python, "-c", _PEER, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            with lmi_serve(
                [str(model), "-o", f"option.dtype={arguments.dtype}"], variables={"LMI_LOG_LEVEL": "WARNING"}
            ) as server:
                ways = {"lmi serve": served(server.url), "sentence-transformers": peer(other)}
                print("| batch | " + " | ".join(f"{name}, texts/s" for name in ways) + " | ratio |\n|---|---|---|---|")
                for batch in arguments.batch:
                    rates: dict[str, list[float]] = {name: [] for name in ways}
                    for _ in range(arguments.rounds):
                        for name, embed in ways.items():
                            rates[name].append(rate(embed, batch, arguments.seconds))
                    ours, theirs = (statistics.median(found) for found in rates.values())
                    print(f"| {batch} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |", flush=True)
        finally:
            other.terminate()
            other.wait()


if __name__ == "__main__":
    main()
