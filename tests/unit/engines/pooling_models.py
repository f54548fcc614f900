"""Small models with random weights, which tests write as Hugging Face directories; transformers' answers are golden.

`python -m tests.unit.engines.pooling_models`, with torch and transformers, writes the golden files. The weights come
from numpy's generator, so that the tests need neither.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "pooling.json"
RANKED = GOLDEN.with_name("rerank.json")
"""Raw scores of QUERY with each of DOCUMENTS, by the rerankers' names."""

_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 60,
    "max_position_embeddings": 40,
}  # fmt: skip
_LABELS = {str(number): f"label {number}" for number in range(3)}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertModel"], "pad_token_id": 0, **_SIZES},
    "xlm-roberta": {
        "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "pad_token_id": 1, "type_vocab_size": 1,
        "layer_norm_eps": 1e-5, **_SIZES,
    },
    "bert classifier": {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "pad_token_id": 0,
        "id2label": _LABELS,
        "label2id": {label: int(number) for number, label in _LABELS.items()}, **_SIZES,
    },
    "bert reranker": {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "pad_token_id": 0,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, **_SIZES,
    },
    "xlm-roberta reranker": {
        "model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"], "pad_token_id": 1,
        "type_vocab_size": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, **_SIZES,
    },
}  # fmt: skip
MODES = ("cls", "mean", "max", "last")

_RNG = numpy.random.Generator(numpy.random.PCG64(5))
TEXTS = [[2, *_RNG.integers(4, 60, length).tolist(), 3] for length in (1, 5, 5, 20, 36)]
"""Ids; of a pair the second text begins in the middle."""

QUERY, DOCUMENTS = "w5 w6", [" ".join(f"w{id}" for id in ids[1:-1][:30]) for ids in TEXTS]


def weights(shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Draw the tensors: large enough that every part of the model counts."""
    rng = numpy.random.Generator(numpy.random.PCG64(7))
    drawn = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(numpy.float32)
        drawn[name] = 1 + values / 10 if "LayerNorm.weight" in name else values / 4
    return drawn


def write_model(directory: Path, name: str, mode: str = "mean") -> Path:
    """Write the directory of a model, with a tokenizer whose words are w4, w5, ..."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    config = CONFIGS[name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights(json.loads(GOLDEN.read_text())[name]["shapes"]), str(directory / "model.safetensors"))
    marks = {"[PAD]": config["pad_token_id"], "[UNK]": 1 - config["pad_token_id"], "[CLS]": 2, "[SEP]": 3}
    words = {f"w{id}": id for id in range(4, 60)}
    tokenizer = Tokenizer(models.WordLevel(marks | words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    if "classifier" in name or "reranker" in name:
        return directory
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    return directory


def second(ids: list[int]) -> int:
    return len(ids) // 2


def _reference(name: str) -> dict[str, Any]:
    """Compute a model's answers by transformers' own classes, in float32."""
    import torch
    import transformers

    config = CONFIGS[name]
    kind = getattr(transformers, config["architectures"][0])
    own = transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
    model = kind(own).eval()
    kept = {key: list(value.shape) for key, value in model.state_dict().items() if value.dtype == torch.float32}
    missing, unexpected = model.load_state_dict(
        {key: torch.from_numpy(value) for key, value in weights(kept).items()}, strict=False
    )
    assert not [key for key in (*missing, *unexpected) if "ids" not in key]
    vectors: dict[str, list[list[float]]] = {}
    for ids in TEXTS:
        types = [int(index >= second(ids)) for index in range(len(ids))]
        pairs = config.get("type_vocab_size", 2) > 1
        with torch.no_grad():
            found = model(
                input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                token_type_ids=torch.tensor([types if pairs and "reranker" in name else [0] * len(ids)]),
            )  # fmt: skip
        if hasattr(found, "logits"):
            vectors.setdefault("logits", []).append(found.logits[0].tolist())
            continue
        hidden = found.last_hidden_state[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(0), "max": hidden.max(0).values, "last": hidden[-1]}
        for mode in MODES:
            vectors.setdefault(mode, []).append(pooled[mode].tolist())
    digits = {key: [[round(value, 5) for value in row] for row in rows] for key, rows in vectors.items()}
    return {"shapes": kept, **digits}


def _ranking(directory: Path, name: str) -> list[float]:
    """Compute the scores of QUERY with DOCUMENTS by transformers' tokenizer and model, in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(write_model(directory, name)).eval()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **names)
    scores = []
    for document in DOCUMENTS:
        types = model.config.type_vocab_size > 1
        given = tokenizer(QUERY, document, return_tensors="pt", return_token_type_ids=types)
        with torch.no_grad():
            scores.append(round(model(**given).logits.item(), 5))
    return scores


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: _reference(name) for name in CONFIGS}) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        ranked = {name: _ranking(Path(scratch) / name, name) for name in CONFIGS if "reranker" in name}
    RANKED.write_text(json.dumps(ranked) + "\n")
