"""A model's size and shape, from its files (on this machine, in S3 or on the hub) or from the table of known models.

The memory that a model needs depends on the number of weights, their precision, and each layer's cache. config.json
describes the layers with transformers' names, and safetensors headers give the number of weights. Dense models,
mixtures of experts (whose experts are all in memory), latent attention, sliding windows, linear attention and state
space models are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.data import table
from deploy.errors import SpecError
from deploy.resolve.model.files import Config, Directory, Files, S3Prefix, json_file
from deploy.resolve.model.gguf import gguf_shape, parts
from deploy.resolve.model.quantization import Contents, Quantization, contents, quantization
from deploy.resolve.model.weights import Weights, cache, count, num_heads, runs, splits
from deploy.spec.sections import Shape

if TYPE_CHECKING:
    from deploy.aws import Aws


def shape_from_table(name: str) -> Shape | None:
    """Return the shape of a hub model from the table of known models, or None if it is not in the table."""
    rows: list[dict[str, Any]] = table("models")["models"]
    for row in rows:
        if name.lower() in (item.lower() for item in row["names"]):
            shape = shape_of_config(config_of(row, rows), row.get("stored"))
            return shape.model_copy(update={"parameters": float(row["parameters"])})
    return None


def config_of(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the config.json of a table row. A row with `of` lists only the differences from that model."""
    config: dict[str, Any] = row["config"]
    if "of" not in row:
        return config
    return config_of(next(item for item in rows if row["of"] in item["names"]), rows) | config


def shape_in_directory(directory: Path, notes: list[str] | None = None) -> Shape | None:
    """Return the shape of a model in a local directory, or None if it has neither a config.json nor a .gguf file.

    Args:
        notes: list to which a sentence is added for each problem in the files.

    Raises:
        SpecError: the files are invalid.
    """
    return read_shape(Directory(directory), notes)


def shape_in_s3(aws: Aws, prefix: str, notes: list[str] | None = None) -> Shape | None:
    """Return the shape of a model in S3, or None if it has neither a config.json nor a .gguf file.

    Args:
        prefix: prefix of the model files, as `s3://bucket/prefix/`.
        notes: list to which a sentence is added for each problem in the files.

    Raises:
        SpecError: the files are invalid.
    """
    return read_shape(S3Prefix(aws, prefix), notes)


def read_shape(files: Files, notes: list[str] | None = None, gguf: str | None = None) -> Shape | None:
    """Return the shape of a model from its files, or None if there is neither a config.json nor a .gguf file.

    Args:
        notes: list to which a sentence is added for each problem in the files.
        gguf: name of the .gguf file to use, or None to use config.json if there is one.

    Raises:
        SpecError: the files are invalid.
    """
    notes = [] if notes is None else notes
    if gguf is not None or "config.json" not in files.sizes:
        names = parts(files, gguf)
        return gguf_shape(files, names) if names else None
    config = json_file(files, "config.json") or {}
    if (quantized := json_file(files, "hf_quant_config.json")) is not None:  # ModelOpt's
        section = quantized.get("quantization")
        config = {
            **config,
            "quantization_config": {"quant_method": "modelopt", **(section if isinstance(section, dict) else {})},
        }
    names = _weight_files(files)
    return shape_of_config(
        config, sum(files.sizes[name] for name in names) or None, _counted(files, config, names, notes)
    )


_CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "model_max_length")


def shape_of_config(config: Mapping[str, Any], stored: int | None = None, held: Contents | None = None) -> Shape:
    """Return the shape that a config.json describes.

    Args:
        config: content of config.json. For a multimodal model, the shape has the layers of the text model, and the
            weights of all parts.
        stored: size of the checkpoint's weight files in bytes, or None if it is unknown.
        held: contents of the weight files according to their headers, or None if the headers were not read.

    Raises:
        SpecError: a value is missing or invalid.
    """
    text = Config(config)
    dimensions, weights, how = cache(text), count(text), quantization(text)
    layers = len(runs(text))
    if held is not None and held.layers:
        layers += max(held.layers - text.layers(), 0)
    special_layers = dimensions.window_layers + dimensions.uncached
    divided, experts = splits(text, how.block, how.unquantized)
    return Shape(
        parameters=_parameters(weights, how, stored, held),
        layers=max(layers, special_layers),
        kv_heads=dimensions.kv_heads,
        head_dim=dimensions.head_dim,
        heads=num_heads(text),
        splits=sorted(set(divided)),
        expert_splits=experts,
        context=text.number(*_CONTEXT, default=0) or None,
        embeddings=weights["embeddings"] + weights["head"] + weights["media"],
        window_layers=dimensions.window_layers,
        window=dimensions.window,
        window_kv_heads=dimensions.window_kv_heads,
        window_head_dim=dimensions.window_head_dim,
        uncached_layers=dimensions.uncached,
        state=dimensions.state,
        extra_values=dimensions.extra,
        kv_heads_by_layer=list(dimensions.by_layer),
        dtype=how.dtype,
        stored=_stored(how.stored(weights) if how.quantized else None, stored, held),
    )


def _parameters(weights: Weights, how: Quantization, stored: int | None, held: Contents | None) -> float:
    """Return the number of weights from the file headers, or else estimate it from the file size.

    The dimensions in config.json are used if the size is unknown or, for a quantized checkpoint, roughly agrees.
    """
    if held is not None and held.parameters:
        return held.parameters
    counted = sum(weights.values())
    if stored is None or (how.quantized and 0.5 < how.stored(weights) / stored < 2):
        return counted
    unquantized = min(how.unquantized_weights(weights), stored / 2) if how.quantized else 0.0
    return unquantized + (stored - 2 * unquantized) / how.width


def _stored(estimated: float | None, stored: int | None, held: Contents | None) -> float | None:
    return float(held.stored) if held is not None and held.stored else stored or estimated


def _counted(files: Files, config: Mapping[str, Any], names: list[str], notes: list[str]) -> Contents | None:
    """Return the contents of the safetensors files, or None if there are none or (with a note) if they are invalid."""
    if not names or not names[0].endswith(".safetensors"):
        return None
    text = Config(config)
    how = quantization(text)
    bits = 8 if how.dtype in ("int8", "fp8") else 4
    try:
        held = contents(files, names, bits, fp4_experts=how.expert_width is not None)
    except SpecError as error:
        notes.append(f"The number of weights is estimated from the files' sizes: {error}.")
        return None
    num_layers, drafts = text.layers(), text.number("num_nextn_predict_layers", default=0)
    if held.layers and not num_layers <= held.layers <= num_layers + drafts:
        notes.append(
            f"config.json says {num_layers} layers, but the files contain {held.layers}. The larger number is used."
        )
    elif held.layers:
        return Contents(held.parameters, held.stored, num_layers)
    return held


def _weight_files(files: Files) -> list[str]:
    """Return the names of the weight files that are loaded.

    They are the files in the index, or else all .safetensors files, or else all .bin files. Consolidated copies are
    omitted if there are other files.
    """
    index = json_file(files, "model.safetensors.index.json") or {}
    places = index.get("weight_map")
    if isinstance(places, dict):
        listed = sorted({str(name) for name in places.values()} & files.sizes.keys())
        if listed:
            return listed
    for ending in (".safetensors", ".bin"):
        names = [name for name in sorted(files.sizes) if name.endswith(ending) and name != "training_args.bin"]
        if names:
            return [name for name in names if not name.startswith("consolidated")] or names
    return []
