"""The architecture of Llama, Mistral, Qwen and Gemma models, read from config.json.

The defaults and rules are the same as in transformers' configuration classes. If a value is unsupported,
`UnknownDecoder` is raised with the name of the value, before any weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from handler.config import model_files
from handler.core.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported types of rotary embeddings. Their frequencies do not depend on the number of tokens."""


class Rotary(NamedTuple):
    """A layer's rotary position embedding. `parameters` come from config.json and include `rope_theta`."""

    size: int  # of a head
    parameters: Mapping[str, Any]
    context: int  # max_position_embeddings

    @property
    def kind(self) -> str:
        return str(self.parameters.get("rope_type") or self.parameters.get("type") or "default")

    def frequencies(self) -> tuple[Any, float]:
        """Return the frequencies, half as many as the head size, and the factor by which sine and cosine are scaled."""
        import numpy as np

        theta = float(self.parameters["rope_theta"])
        plain = 1 / np.float32(theta) ** (np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size))
        if self.kind == "default":
            return plain, 1.0
        factor = float(self.parameters["factor"])
        if self.kind == "linear":
            return plain / np.float32(factor), 1.0
        original = float(self.parameters.get("original_max_position_embeddings") or self.context)
        if self.kind == "llama3":
            return _llama3(plain, factor, original, self.parameters), 1.0
        return _yarn(plain, factor, original, self.parameters, theta), _attention_factor(factor, self.parameters)


def _llama3(plain: Any, factor: float, original: float, parameters: Mapping[str, Any]) -> Any:
    """Divide low frequencies by `factor`, keep high frequencies, and interpolate in between (Llama 3.1)."""
    import numpy as np

    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - smooth) * plain / factor + smooth * plain).astype(np.float32)


def _yarn(plain: Any, factor: float, original: float, parameters: Mapping[str, Any], theta: float) -> Any:
    """Divide low frequencies by `factor`, keep high frequencies, and interpolate by index (YaRN, arXiv 2309.00071)."""
    import numpy as np

    size = 2 * len(plain)

    def number_with(turns: float) -> float:
        """Return the index of the frequency that completes this many turns within the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = number_with(float(parameters.get("beta_fast") or 32))
    high = number_with(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    divided = np.clip((np.arange(size // 2) - low) / ((high - low) or 0.001), 0, 1)
    return (plain / factor * divided + plain * (1 - divided)).astype(np.float32)


def _attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    if (value := parameters.get("attention_factor")) is not None:
        return float(value)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return mscale(float(above)) / mscale(float(below)) if above and below else mscale(1)


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Maps the name of each activation in config.json to the handler's name for it."""

_MAX_HEAD = 512  # largest head size; the CPU plugin's paged attention was tested with 16 to 256


class UnknownDecoder(Exception):
    """Raised if the model uses an unsupported feature; the message names the feature."""


@dataclass(frozen=True)
class _Family:
    """Differences between a model type and Llama.

    Attributes:
        architecture: name of transformers' class for text generation.
        defaults: default values for config.json.
        biases: attention matrices that always have biases, or None if config.json specifies them.
        head_norms: whether queries and keys are normalized.
        is_gemma: whether norms multiply by `1 + weight` and embeddings are scaled.
        four_norms: whether the outputs of the attention and the feed-forward network are also normalized.
    """

    architecture: str
    defaults: Mapping[str, Any]
    biases: tuple[str, ...] | None = None
    head_norms: bool = False
    is_gemma: bool = False
    four_norms: bool = False


_PLAIN = {"hidden_act": "silu", "tie_word_embeddings": False}
_WINDOWS = {**_PLAIN, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_MISTRAL = {**_PLAIN, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2 = {**_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh"}

_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", {**_PLAIN, "max_position_embeddings": 2048}),
    "mistral": _Family("MistralForCausalLM", _MISTRAL, biases=()),
    "ministral": _Family("MinistralForCausalLM", _MISTRAL, biases=()),
    "qwen2": _Family("Qwen2ForCausalLM", {**_WINDOWS, "max_position_embeddings": 32_768}, biases=("q", "k", "v")),
    "qwen3": _Family(
        "Qwen3ForCausalLM", {**_WINDOWS, "head_dim": 128, "max_position_embeddings": 32_768}, head_norms=True
    ),
    "gemma": _Family(
        "GemmaForCausalLM",
        {**_GEMMA, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192},
        is_gemma=True,
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA2,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        is_gemma=True,
        four_norms=True,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        {**_GEMMA2, "max_position_embeddings": 131_072},
        head_norms=True,
        is_gemma=True,
        four_norms=True,
    ),
}

FAMILIES = "Llama, Mistral, Qwen2, Qwen3 and Gemma"
"""Names of the supported families, for messages."""


@dataclass(frozen=True)
class Layer:
    """Properties of a layer. `window` is the number of tokens that the layer attends to, or None for all tokens."""

    window: int | None
    rotary: Rotary


@dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a language model. Sizes are numbers of dimensions.

    Attributes:
        scale: factor by which products of queries and keys are multiplied.
        attention_biases: attention matrices that have biases.
        logit_cap: value at which tanh soft-caps the logits, or None for no cap.
    """

    model_type: str
    vocabulary: int
    size: int
    inner_size: int
    heads: int
    key_heads: int
    head_size: int
    layers: tuple[Layer, ...]
    epsilon: float
    activation: str
    scale: float
    attention_biases: tuple[str, ...] = ()
    mlp_bias: bool = False
    head_norms: bool = False
    is_gemma: bool = False
    four_norms: bool = False
    tied: bool = False
    logit_cap: float | None = None


def read_decoder(model: Path) -> DecoderConfig:
    """Read the architecture of a model from its config.json.

    Raises:
        UnknownDecoder: the model uses an unsupported feature.
        ConfigError: a value is missing or invalid.
    """
    path = model / "config.json"
    config = model_files.read_json(path)
    family = _family(config)
    return _Reader(path, {**family.defaults, **_present(config)}, family).read()


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove null values, except where null has a meaning."""
    null = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping")
    return {name: value for name, value in config.items() if value is not None or name in null}


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnknownDecoder(f"its model_type is {model_type}; supported: {', '.join(_FAMILIES)}")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else family.architecture
    if architecture != family.architecture:
        raise UnknownDecoder(f"it is a {architecture}; a {model_type} model must be a {family.architecture}")
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            raise UnknownDecoder(f"its weights are quantized ({name})")
    if config.get("auto_map"):
        raise UnknownDecoder("it contains custom code (auto_map)")
    return family


class _Reader:
    def __init__(self, path: Path, values: Mapping[str, Any], family: _Family) -> None:
        self._path, self._values, self._family = path, values, family

    def read(self) -> DecoderConfig:
        for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if self._values.get(name):
                raise self._wrong(f"{name} is {self._values[name]}, which OpenVINO's paged attention does not support")
        size, heads = self._whole("hidden_size"), self._whole("num_attention_heads")
        key_heads = self._whole("num_key_value_heads", heads)
        head_size = self._whole("head_dim", size // heads)
        if heads % key_heads or head_size % 2 or head_size > _MAX_HEAD:
            raise self._wrong(
                f"cannot combine num_attention_heads={heads}, num_key_value_heads={key_heads} and head_dim={head_size}"
            )
        num_layers = self._whole("num_hidden_layers")
        scale = self._number("query_pre_attn_scalar", head_size) ** -0.5 if self._family.four_norms else head_size**-0.5
        return DecoderConfig(
            model_type=str(self._values["model_type"]),
            vocabulary=self._whole("vocab_size"),
            size=size,
            inner_size=self._whole("intermediate_size"),
            heads=heads,
            key_heads=key_heads,
            head_size=head_size,
            layers=tuple(self._layers(num_layers, head_size)),
            epsilon=self._number("rms_norm_eps", 1e-6),
            activation=self._activation(),
            scale=scale,
            attention_biases=self._biases(),
            mlp_bias=self._values["model_type"] == "llama" and self._flag("mlp_bias"),
            head_norms=self._family.head_norms,
            is_gemma=self._family.is_gemma,
            four_norms=self._family.four_norms,
            tied=self._flag("tie_word_embeddings"),
            logit_cap=self._logit_cap(),
        )

    def _biases(self) -> tuple[str, ...]:
        if self._family.biases is not None:
            return self._family.biases
        return ("q", "k", "v", "o") if self._flag("attention_bias") else ()

    def _logit_cap(self) -> float | None:
        cap = self._values.get("final_logit_softcapping")
        return None if cap is None or not self._family.four_norms else self._number("final_logit_softcapping", 0)

    def _activation(self) -> str:
        name = self._values["hidden_activation" if self._family.four_norms else "hidden_act"]
        if self._values["model_type"] == "gemma" and name == "gelu":  # Gemma's first files mean gelu_pytorch_tanh
            name = self._values.get("hidden_activation", "gelu_pytorch_tanh")
        if name not in _ACTIVATIONS:
            raise UnknownDecoder(f"its activation is {name}; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def _layers(self, count: int, head_size: int) -> list[Layer]:
        kinds = self._kinds(count)
        window = self._whole("sliding_window") if "sliding_attention" in kinds else None
        rotary = {kind: self._rotary(kind, head_size) for kind in set(kinds)}
        return [Layer(window if kind == "sliding_attention" else None, rotary[kind]) for kind in kinds]

    def _kinds(self, count: int) -> Sequence[str]:
        """Return the kind of each layer, under the name that transformers uses."""
        model_type, window = self._values["model_type"], self._values.get("sliding_window")
        if model_type in ("llama", "gemma"):
            return ["full_attention"] * count
        if self._values.get("layer_types") is not None and model_type != "mistral":
            return self._layer_types(count)
        if model_type in ("mistral", "ministral"):
            first, period = (0, count + 1) if window is not None else (count, 1)
        elif model_type in ("qwen2", "qwen3"):
            slides = self._flag("use_sliding_window") and window is not None
            first, period = (self._whole("max_window_layers", least=0) if slides else count), count + 1
        else:
            first, period = 0, 2 if model_type == "gemma2" else self._whole("sliding_window_pattern", 6)
        near = (index >= first and (index + 1) % period != 0 for index in range(count))
        return ["sliding_attention" if is_near else "full_attention" for is_near in near]

    def _layer_types(self, count: int) -> Sequence[str]:
        layer_types = self._values["layer_types"]
        if not isinstance(layer_types, list) or len(layer_types) != count:
            raise self._wrong(f"layer_types must contain a type for each of the {count} layers")
        if unknown := set(map(str, layer_types)) - {"full_attention", "sliding_attention"}:
            raise UnknownDecoder(f"its layer_types contains {', '.join(sorted(unknown))}")
        slides = "sliding_attention" in layer_types and self._values["model_type"] in ("qwen2", "qwen3")
        if slides and not self._flag("use_sliding_window"):
            raise self._wrong("layer_types contains sliding_attention, but use_sliding_window is not true")
        return layer_types

    def _rotary(self, kind: str, head_size: int) -> Rotary:
        import numpy as np

        values, parameters = self._values, self._rope_parameters(kind)
        rotary = Rotary(head_size, parameters, self._whole("max_position_embeddings"))
        if rotary.kind not in ROPE_TYPES:
            raise UnknownDecoder(f"its rope_type is {rotary.kind}; supported: {', '.join(ROPE_TYPES)}")
        partial = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1))
        if partial != 1:
            raise UnknownDecoder(f"its partial_rotary_factor is {partial}")
        try:
            with np.errstate(all="ignore"):
                frequencies, factor = rotary.frequencies()
            usable = math.isfinite(factor) and bool(abs(frequencies).max() < math.inf)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise self._wrong(
                f"{rotary.kind} rotary position embeddings (RoPE) cannot be computed: {error!r}"
            ) from None
        if not usable:
            raise self._wrong(f"{rotary.kind} rotary position embeddings are infinite or not numbers")
        return rotary

    def _rope_parameters(self, kind: str) -> dict[str, Any]:
        """Return the rotary parameters for a kind of layer, from either of the formats that transformers has used."""
        values, is_gemma3 = self._values, self._values["model_type"] == "gemma3_text"
        slides = is_gemma3 and kind == "sliding_attention"
        parameters = values.get("rope_parameters") or {}
        if not isinstance(parameters, dict) or not isinstance(values.get("rope_scaling") or {}, dict):
            raise self._wrong("rope_parameters and rope_scaling must be objects")
        if any(isinstance(value, dict) for value in parameters.values()):
            parameters = parameters.get(kind) or {}
        elif slides:
            parameters = {}
        if slides:
            return {"rope_theta": values.get("rope_local_base_freq", 1e4), **parameters}
        theta = values.get("rope_theta", 1e6 if is_gemma3 else 1e4)
        return {"rope_theta": theta, **parameters, **(values.get("rope_scaling") or {})}

    # -- values ------------------------------------------------------------------------------------------------------

    def _whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._values.get(name, default)
        if type(value) is not int or value < least:
            raise self._wrong(f"{name} must be a whole number of at least {least}, not {value!r}")
        return value

    def _number(self, name: str, default: float) -> float:
        value = self._values.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def _flag(self, name: str) -> bool:
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(f"{name} must be true or false, not {value!r}")
        return value

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {problem}")
