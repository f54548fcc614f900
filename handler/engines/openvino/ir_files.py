"""Checks an OpenVINO model directory before OpenVINO loads it, whose errors name no file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.parsers import expat

from handler.config import model_files
from handler.core.errors import ConfigError
from handler.engines.huggingface.model_files import check_json

_TEXT = ("openvino_tokenizer", "openvino_detokenizer")
_VISION = ("openvino_language_model", "openvino_text_embeddings_model", "openvino_vision_embeddings_model")
_WHISPER = ("openvino_encoder_model", "openvino_decoder_model")

PRECISION = "lmi_precision"
"""Key in config.json of a model that this server converted: `f32` where that is the fastest precision."""


def is_vision(model: Path) -> bool:
    """Whether a directory has a model that takes images."""
    return (model / f"{_VISION[0]}.xml").is_file()


def parts(*, vision: bool) -> tuple[str, ...]:
    """Return the names of a directory's graphs."""
    return (*(_VISION if vision else ("openvino_model",)), *_TEXT)


def whisper_parts() -> tuple[str, ...]:
    """Return the names of a Whisper's graphs."""
    return (*_WHISPER, *_TEXT)


def language_model(model: Path) -> Path:
    """Return the graph that computes logits."""
    return model / (f"{_VISION[0]}.xml" if is_vision(model) else "openvino_model.xml")


def check_directory(directory: Path, names: Sequence[str]) -> None:
    """Raise ConfigError where a file is missing, cut short or of a wrong format.

    Args:
        names: of the graphs that are needed.
    """
    for name in names:
        _check_part(directory / f"{name}.xml", directory / f"{name}.bin", names)
    check_json(directory, "config.json", "generation_config.json")
    context = context_of(directory)
    if context is not None and (not isinstance(context, int) or context < 1):
        raise ConfigError(f"{directory / 'config.json'}: max_position_embeddings must be a whole number of at least 1")


def context_of(directory: Path) -> object:
    """Read the context length, in tokens, from config.json."""
    config = model_files.read_text_config(directory)
    return config.get("max_position_embeddings") or config.get("n_positions")


def prefers_f32(directory: Path) -> bool:
    """Whether a converted model is fastest in f32; the CPU plugin chooses for others."""
    return directory.is_dir() and model_files.read_json(directory / "config.json").get(PRECISION) == "f32"


def _check_part(xml: Path, weights: Path, names: Sequence[str]) -> None:
    if not xml.is_file():
        raise ConfigError(
            f"{xml} is missing: an OpenVINO model directory has {', '.join(f'{name}.xml' for name in names)}"
        )
    model_files.check_content(xml)
    needed = _bytes_needed(xml)
    if needed and not weights.is_file():
        raise ConfigError(f"{weights} is missing, with the weights that {xml.name} describes")
    if needed:
        model_files.check_content(weights)
    if needed > (size := weights.stat().st_size if weights.is_file() else 0):
        raise ConfigError(f"{weights} is cut short: it holds {size:,} bytes, {xml.name} describes {needed:,}")


def _bytes_needed(xml: Path) -> int:
    """Return the end of the last constant in the graph's .bin file."""
    kinds: list[str] = []  # of the open layers and elements
    needed = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal needed
        if not kinds and tag != "net":
            raise ConfigError(f"{xml} is not an OpenVINO model: it begins with <{tag[:64]}>, not <net>")
        kinds.append(attributes.get("type", "") if tag == "layer" else kinds[-1] if kinds else "")
        if tag == "data" and kinds[-1] == "Const":
            needed = max(needed, int(attributes.get("offset", 0)) + int(attributes.get("size", 0)))

    def end(tag: str) -> None:
        kinds.pop()

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    try:
        with xml.open("rb") as file:
            parser.ParseFile(file)
    except expat.ExpatError as error:
        raise ConfigError(f"{xml} is cut short, or no XML: {error}") from None
    except ValueError:
        raise ConfigError(f"{xml} is broken: the place of a constant is not a number") from None
    return needed
