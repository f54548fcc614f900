"""Read a Triton model repository, whose backend and parameters determine the engine and its options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from deploy.data import table
from deploy.errors import Refused
from deploy.s3.archive import Artifact
from handler.config.options.names import variable

_SAME: Mapping[str, str] = table("triton")["same"]
IDLE: Mapping[str, str] = table("triton")["idle"]
MISSING: Mapping[str, str] = table("triton")["missing"]

_BACKEND = re.compile(r'^\s*(?:backend|platform)\s*:\s*"([\w.-]+)"', re.MULTILINE)
_PARAMETER = re.compile(r'key\s*:\s*"(\w+)"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"([^"]*)"')
NAME = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C library limits the depth of a file. For PyYAML's own parser, 5,000 brackets are 10 s of computing."""


def read_repository(artifact: Artifact, name: str, model: str | None) -> tuple[str, dict[str, str]]:
    """Return the engine that runs a repository's model, and the model's parameters as variables.

    A parameter that has no effect or no equivalent here keeps its own name.

    Args:
        artifact: the container's model data.
        name: name of the model to load, or "" if no variable names it.
        model: the user's own model, or None.

    Raises:
        Refused: the backend is not supported, a file cannot be read, or the model is a TensorRT engine.
    """
    model_files = {path: text for path, text in artifact.repository.items() if path.startswith(f"{name}/")}
    has_arguments = any(not path.endswith(".pbtxt") for path in model_files)  # an ensemble has steps instead
    files = model_files if has_arguments else artifact.repository
    backends, values = set[str](), dict[str, Any]()
    for path, text in files.items():
        backends.update(_BACKEND.findall(text))
        values |= dict(_PARAMETER.findall(text)) if path.endswith(".pbtxt") else _arguments(path, text)
    has_engine = "gpt_model_path" in values or artifact.weights.endswith(".engine")
    is_trtllm = has_engine or "tensorrtllm" in backends or any(path.endswith(".yaml") for path in files)
    if not is_trtllm and "vllm" not in backends:
        holds = f"archive holds a Triton repository for the backend {', '.join(sorted(backends))}"
        unread = f"container's Triton repository was not read: {artifact.problem or 'no archive has a config.pbtxt'}"
        raise Refused(f"the {holds if backends else unread}", "adopt supports the backends of TensorRT-LLM and vLLM.")
    if has_engine and model is None:
        raise Refused(
            "the archive holds a Triton repository for TensorRT-LLM, whose TensorRT engine runs only in Triton",
            "Pass the model from which the engine was built: --model ID, or --model s3://BUCKET/PREFIX/.",
        )
    models = {path.partition("/")[0] for path in files}
    names = {NAME: models.pop()} if len(models) == 1 else {}
    parameters = {
        _name(key): value for key, value in values.items() if value not in (None, "") and "${" not in str(value)
    }
    settings = {
        key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in parameters.items()
    }
    return "trtllm" if is_trtllm else "vllm", {**names, **settings}


def _arguments(path: str, text: str) -> dict[str, Any]:
    """Return the engine's arguments from a YAML or JSON file."""
    try:
        # Aliases would multiply the text.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _LOADER)):
            raise ValueError("it has YAML aliases")
        return {str(key): value for key, value in yaml.load(text, _LOADER).items()}
    except (yaml.YAMLError, AttributeError, ValueError, RecursionError) as error:
        raise Refused(f"the archive's {path} cannot be read: {str(error).splitlines()[0]}") from None


def _name(key: str) -> str:
    return key if key in IDLE or key in MISSING else variable(_SAME.get(key, f"option.{key}"))
