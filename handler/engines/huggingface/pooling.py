"""Pooling of a model that reads whole texts: read its files, and turn its numbers into those of the answer.

Source of the files: github.com/huggingface/sentence-transformers, `modules.json` and what it names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from handler.config import model_files
from handler.config.model_files import label_names
from handler.core import text_files
from handler.core.errors import ConfigError
from handler.core.values import Pooling

NO_POOLED_LORA = "it generates no text here (option.task)"

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
"""Flags of a Pooling module's config.json; newer ones name the mode in `pooling_mode`."""

_MODULES = ("Transformer", "Pooling", "Normalize")
_ANY = 1 << 30  # tokens; transformers writes a still larger number for no limit
_LEAST = 1e-12  # of a length that divides, as torch's `normalize` has it


class PoolingFiles(NamedTuple):
    """A model's pooling, as its files describe it.

    Attributes:
        mode: of the tokens' vectors an embedding is the first (cls), the last, the mean or the largest (max).
        normalize: an embedding has length 1 unless a request says otherwise.
        most_tokens: tokens of a text, special ones included; None: any number.
        exclusive: of several labels one holds.
    """

    mode: str
    normalize: bool
    most_tokens: int | None
    exclusive: bool

    def finish(self, values: Any, pooling: Pooling) -> list[float]:
        """Turn what the model computed of a text into what the request asks for.

        Args:
            values: the pooled vector, or a logit for each label: a numpy array of float32.
        """
        import numpy

        if pooling.kind != "embed":
            if not pooling.normalize:
                numbers = values
            elif self.exclusive and len(values) > 1:
                numbers = numpy.exp(values - values.max())
                numbers /= numbers.sum()
            else:
                numbers = 1 / (1 + numpy.exp(-values))
        else:
            numbers = values[: pooling.dimensions]
            if self.normalize if pooling.normalize is None else pooling.normalize:
                numbers = numbers / max(float(numpy.linalg.norm(numbers)), _LEAST)
        finished: list[float] = numbers.tolist()
        return finished


def read_pooling(model: Path, given: str = "auto") -> PoolingFiles:
    """Read a model's files.

    Args:
        given: option.pooling, which beats them.

    Raises:
        ConfigError: a file is broken, or asks for something that is not computed here; the message names it.
    """
    modules = _modules(model)
    mode, normalize = "mean", False  # sentence-transformers' own for a model without modules
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling" and given == "auto":
            mode = _mode(model / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind not in _MODULES:
            raise ConfigError(f"{model / 'modules.json'}: the module {kind[:64]!r} is not served")
    config = model_files.read_json(model / "config.json")
    exclusive = config.get("problem_type") != "multi_label_classification" and len(label_names(model)) > 1
    return PoolingFiles(mode if given == "auto" else given, normalize, _most_tokens(model, config), exclusive)


def _modules(model: Path) -> list[dict[str, Any]]:
    file = model / "modules.json"
    if not file.is_file():
        return []
    import json

    try:
        modules = json.loads(text_files.read_text(file))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{file} holds no list of modules")
    return modules


def _mode(file: Path) -> str:
    config = model_files.read_json(file)
    if named := config.get("pooling_mode"):
        modes = [{"lasttoken": "last"}.get(named, named)] if isinstance(named, str) else list(named)
    else:
        flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        modes = [MODES.get(flag, flag) for flag in flags] or ["mean"]
    if len(modes) != 1 or modes[0] not in MODES.values():
        raise ConfigError(f"{file}: {' and '.join(map(str, modes))} is not served; one of {', '.join(MODES.values())}")
    return str(modes[0])


def _most_tokens(model: Path, config: dict[str, Any]) -> int | None:
    """Return the least of what the model and its tokenizer can take, or what sentence-transformers was told."""
    given = model_files.read_json(model / "sentence_bert_config.json").get("max_seq_length")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and "roberta" in str(config.get("model_type")):
        positions -= int(config.get("pad_token_id", 1)) + 1  # its positions begin after that of padding
    own = model_files.read_json(model / "tokenizer_config.json").get("model_max_length")
    found = [limit for limit in (given, positions, own) if isinstance(limit, int) and 0 < limit < _ANY]
    return min(found, default=None)
