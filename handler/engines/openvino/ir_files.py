"""Checks, downloads and converts OpenVINO model directories.

The files are checked before they are loaded, because OpenVINO's errors do not name the file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.parsers import expat

from handler.config import model_files
from handler.config.model_files import is_openvino, visible
from handler.core.errors import ConfigError
from handler.core.package import install
from handler.core.values import Task
from handler.engines.downloads import NEEDED, fingerprint, make_once, run_converter
from handler.engines.huggingface import files
from handler.engines.huggingface.files import check_json
from handler.engines.huggingface.media import no_images
from handler.engines.openvino.decoder.config import FAMILIES, UnknownDecoder, read_decoder
from handler.engines.openvino.decoder.convert import Quantization, check_weights
from handler.engines.openvino.pooling import has_bert_config

log = logging.getLogger(__name__)

_TEXT = ("openvino_tokenizer", "openvino_detokenizer")
_VISION = ("openvino_language_model", "openvino_text_embeddings_model", "openvino_vision_embeddings_model")
WHISPER_PARTS = ("openvino_encoder_model", "openvino_decoder_model", *_TEXT)
"""The file names, without suffix, of the graphs in a Whisper model's directory."""

PRECISION = "lmi_precision"
"""Key that the converter adds to config.json. The value `f32` means that the model runs fastest in f32."""


def is_vision(model: Path) -> bool:
    """Return whether an OpenVINO directory contains a model that accepts images."""
    return (model / f"{_VISION[0]}.xml").is_file()


def parts(*, vision: bool) -> tuple[str, ...]:
    """Return the file names, without suffix, of the graphs in a language model's directory."""
    return (*(_VISION if vision else ("openvino_model",)), *_TEXT)


def language_model(model: Path) -> Path:
    """Return the path of the graph that computes logits."""
    return model / (f"{_VISION[0]}.xml" if is_vision(model) else "openvino_model.xml")


def ids_of(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Encode a text with GenAI's tokenizer.

    Args:
        special: whether to add special tokens, such as the model's usual first token.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).input_ids.data[0].tolist()
    return ids


def check_directory(directory: Path, names: Sequence[str]) -> None:
    """Raise ConfigError if a file is missing, truncated or in the wrong format.

    Args:
        names: file names, without suffix, of the required graphs.
    """
    for name in names:
        _check_part(directory / f"{name}.xml", directory / f"{name}.bin", names)
    check_json(directory, "config.json", "generation_config.json")
    context = context_of(directory)
    if context is not None and (not isinstance(context, int) or context < 1):
        raise ConfigError(f"{directory / 'config.json'}: max_position_embeddings must be a whole number of at least 1")


def context_of(directory: Path) -> object:
    """Return the context length in tokens from config.json without checking it, or None if it is not specified."""
    config = model_files.read_text_config(directory)
    length = config.get("max_position_embeddings")
    return config.get("n_positions") if length is None else length


def prefers_f32(directory: Path) -> bool:
    """Return whether the converter recorded that the model runs fastest in f32."""
    return directory.is_dir() and model_files.read_json(directory / "config.json").get(PRECISION) == "f32"


def _check_part(xml: Path, weights: Path, names: Sequence[str]) -> None:
    if not xml.is_file():
        raise ConfigError(
            f"{xml} is missing: an OpenVINO model directory must contain {', '.join(f'{name}.xml' for name in names)}"
        )
    model_files.check_content(xml)
    needed = _bytes_needed(xml)
    if needed and not weights.is_file():
        raise ConfigError(f"{weights} is missing; it contains the weights that {xml.name} describes")
    if needed:
        model_files.check_content(weights)
    if needed > (size := weights.stat().st_size if weights.is_file() else 0):
        raise ConfigError(f"{weights} is cut short: it has {size:,} bytes, but {xml.name} describes {needed:,}")


def _bytes_needed(xml: Path) -> int:
    """Return the required size of the graph's .bin file in bytes: the end of its last constant."""
    kinds: list[str] = []  # for each open element, the type of the layer that contains it
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
        raise ConfigError(f"{xml} is cut short, or not XML: {error}") from None
    except ValueError:
        raise ConfigError(f"{xml} is broken: the offset or size of a constant is not a number") from None
    return needed


# -- download models from the hub, and convert Hugging Face checkpoints to OpenVINO directories ------------------------
# OpenVINO GenAI reads its own format and some GGUF files, but not safetensors. The package `decoder` converts language
# models of some families. All others need optimum-intel with torch, a large optional extra that is used once per model.
# Each converter runs in a separate process, so that its memory is freed.

RECIPE = b"1"  # part of every fingerprint: change it whenever CONVERTER changes
DECODER_RECIPE = "own 2"  # the recipe of DECODER_CONVERTER: change it whenever the output changes

DECODER_CONVERTER = "import sys; from handler.engines.openvino.decoder.convert import main; main(*sys.argv[1:], {}, {})"

# `optimum-cli` is not used: it offers fp32 (twice the size of a bf16 checkpoint), fp16 (rounds small weights) or,
# without a format, int8 for models of at least 1e9 parameters. An empty OVConfig keeps the checkpoint's own type.
CONVERTER = """
import sys
from transformers import AutoTokenizer
if len(AutoTokenizer.from_pretrained(sys.argv[1])) < 100:  # transformers invents a tokenizer if the files are missing
    sys.exit("the checkpoint has no tokenizer files")
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
main_export(sys.argv[1], sys.argv[2], task="TASK", library_name="transformers",
            ov_config=OVConfig(), convert_tokenizer=True)
"""

POOLING_CONVERTER = """
import shutil, sys
from pathlib import Path
from transformers import AutoTokenizer
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
source, target = Path(sys.argv[1]), Path(sys.argv[2])
main_export(source, target, task="TASK", library_name="transformers", ov_config=OVConfig(), convert_tokenizer=False)
for pattern in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "*_Pooling"):
    for path in source.glob(pattern):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, target / path.name)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
"""

_EXPORTS = {
    Task.EMBEDDING: "feature-extraction",
    Task.CLASSIFICATION: "text-classification",
    Task.RERANK: "text-classification",
    Task.TRANSCRIPTION: "automatic-speech-recognition-with-past",
}
"""Maps each task to its name in optimum."""


def download(model_id: str, revision: str | None) -> Path:
    """Download a model from the hub. The weights are downloaded last, as the other files determine which are needed.

    Raises:
        ConfigError: the model does not exist, the hub cannot be reached, or no available format can be loaded.
    """
    if gguf := files.gguf_file(model_id):
        return files.download_gguf(*gguf, revision)
    directory = files.download_descriptions(model_id, revision)
    if is_openvino(directory):
        return files.download(model_id, revision, without=(*files.OTHER_FORMATS, "*.safetensors", *files.TORCH))
    if not (directory / "config.json").is_file():
        reason = f"{model_id} on the hub has neither openvino_model.xml nor config.json"
        raise files.without_file(model_id, revision, reason)
    fetched = bool(visible(directory, "*.safetensors"))  # if so, the model may also be converted already
    here = has_bert_config(directory) or not unknown(directory)
    if not fetched and not here and not converter_is_installed():
        raise ConfigError(
            f"{model_id} must be converted for OpenVINO. Run: {install('lmi-handler[convert]')}; then start again. "
            "The organization OpenVINO on the hub has models that need no conversion. "
            f"On a GPU, run: lmi serve {model_id} --engine vllm"
        )
    return files.download_checkpoint(model_id, revision, torch=converter_is_installed())


def conversion(model_id: str) -> str:
    """Describe when a model on the hub is converted at startup. Return "" if it needs no conversion."""
    if not files.is_hub_name(model_id) or model_id.startswith("OpenVINO/"):
        return ""
    there = "is" if converter_is_installed() else "is not"
    return (
        "unless the hub has the model in OpenVINO's format, it is converted once and cached; families other than "
        f"{FAMILIES} need {install('lmi-handler[convert]')} (6 GB with torch), which {there} installed"
    )


fetch = partial(files.fetch, download=download, is_name=files.is_hub_reference)


def convert(source: Path, cache: Path, task: Task = Task.GENERATION, quantization: Quantization | None = None) -> Path:
    """Convert `source` to an OpenVINO directory below `cache`, unless this was done before. Return the directory."""
    check_converter(source, cache, task, quantization)
    if reason := unknown(source, task):
        (script, needed), by = _optimum(source, task), f"with optimum-intel, because {reason}"
    else:
        script, needed, by = DECODER_CONVERTER.format(*(quantization or (0, 0))), NEEDED, "without torch"

    def make(directory: Path, lock: int) -> None:
        log.info("converting %s to OpenVINO's format %s; this happens once and may take minutes", source, by)
        run_converter(script, source, directory, lock, needed)

    return make_once(_target(source, cache, task, quantization), make)


def _optimum(source: Path, task: Task) -> tuple[str, Sequence[str]]:
    """Return the script that converts a checkpoint with optimum-intel, and the files that it must write."""
    if task is Task.TRANSCRIPTION:
        return CONVERTER.replace("TASK", _EXPORTS[task]), [f"{part}.xml" for part in WHISPER_PARTS]
    if task is Task.GENERATION:
        vision = not no_images(source)
        script = CONVERTER.replace("TASK", "image-text-to-text" if vision else "text-generation-with-past")
        return script, [f"{part}.xml" for part in parts(vision=vision)]
    return POOLING_CONVERTER.replace("TASK", _EXPORTS[task]), ("openvino_model.xml", "tokenizer.json")


def check_converter(
    source: Path, cache: Path, task: Task = Task.GENERATION, quantization: Quantization | None = None
) -> None:
    """Check that the checkpoint `source` has been converted or can be converted.

    Raises:
        ConfigError: the required converter is not installed, the model cannot be quantized, or its weights are missing
            or do not match its config.json.
    """
    if _target(source, cache, task, quantization).is_dir():
        return
    if not any(visible(source, pattern) for pattern in ("*.safetensors", *files.TORCH)):
        raise ConfigError(f"{source} has a config.json but no weights: no .safetensors files, no {files.TORCH[0]}")
    reason = unknown(source, task)
    if not reason:
        check_weights(source, read_decoder(source))
    elif quantization is not None:
        raise ConfigError(f"option.quantize: {source} cannot be quantized, because {reason}; omit the option")
    elif not converter_is_installed():
        raise ConfigError(
            f"{source} must be converted with optimum-intel, because {reason}. "
            f"Run: {install('lmi-handler[convert]')}; then start again"
        )


def unknown(source: Path, task: Task = Task.GENERATION) -> str:
    """Return the reason why a checkpoint cannot be converted without optimum-intel, or "" if it can.

    Raises:
        ConfigError: the checkpoint's config.json is broken.
    """
    if task is not Task.GENERATION:
        return "it does not generate text"
    if not visible(source, "*.safetensors"):
        return "it has no safetensors files"
    try:
        read_decoder(source)
    except UnknownDecoder as error:
        return str(error)
    return ""


def converter_is_installed() -> bool:
    return bool(find_spec("optimum") and find_spec("optimum.intel"))  # without optimum, the second call would raise


def _target(source: Path, cache: Path, task: Task, quantization: Quantization | None) -> Path:
    files = sorted(path for path in source.iterdir() if path.is_file())
    recipe = RECIPE if task is Task.GENERATION else b"1 " + _EXPORTS[task].encode()
    if not unknown(source, task):
        recipe = f"{DECODER_RECIPE} {quantization or ''}".encode()
    return cache / fingerprint(recipe, files, read=["config.json"])
