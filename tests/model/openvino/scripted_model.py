"""A language model that has its lines ready: each token follows from where it stands alone.

Under a guide it says what it would only where the guide allows that, which is how to learn what a guide allows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino import opset13 as ops

from handler.engines.base import EngineConfig
from handler.engines.openvino.model import eos_ids
from handler.engines.openvino.structured_output import write_blank_model

_SURE = 4.0  # half of the logits between a token and the next likely ones
_SCRIPT = 1024  # ids, after which another script begins: a line is the answer to a prompt of all ids before it


class Speaker:
    """Says one of its lines, from the model's tokenizer, as far as a guide lets it.

    Args:
        model: the files of the model whose tokenizer is used.
        num_logits: of that model.
    """

    def __init__(self, model: Path, num_logits: int, lines: Sequence[str]) -> None:
        self._tokenizer = openvino_genai.Tokenizer(str(model))
        self._eos = eos_ids(EngineConfig(model=model), self._tokenizer)
        self._num_logits = num_logits
        self._lines: dict[str, tuple[list[int], int, list[int]]] = {}  # its script, where it begins there, and its ids
        script: list[int] = []
        for line in dict.fromkeys(lines):
            if len(script) > _SCRIPT:
                script = []
            ids = self._tokenizer.encode(line, add_special_tokens=False).input_ids.data[0].tolist() if line else []
            self._lines[line] = (script, len(script), [*map(int, ids), min(self._eos)])
            script += self._lines[line][2]
        self._script: list[int] = []  # of the pipeline
        self._pipeline: Any = None

    def _begin(self, script: list[int]) -> None:
        """Make the pipeline that has a script ready, in the place of another's."""
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = 1
        scheduler.max_num_batched_tokens = len(script) + 64
        scheduler.num_kv_blocks = len(script) // 16 + 16
        with tempfile.TemporaryDirectory() as directory:
            _write(Path(directory), self._num_logits, script)
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(directory, self._tokenizer, scheduler, "CPU")
        self._script = script

    def says(self, line: str, structured_output: Mapping[str, str]) -> bool:
        """The guide, as `StructuredOutputConfig`'s keywords, lets it say the line and be at the end."""
        script, start, ids = self._lines[line]
        if script is not self._script:
            self._begin(script)
        config = openvino_genai.GenerationConfig(max_new_tokens=len(ids))
        config.eos_token_id = min(self._eos)
        config.stop_token_ids = set(self._eos)
        config.structured_output_config = openvino_genai.StructuredOutputConfig(**structured_output)
        prompt = openvino.Tensor(np.zeros((1, start + 1), dtype=np.int64))
        found = list(self._pipeline.generate([prompt], [config])[0].m_generation_ids[0])
        return found in (ids, ids[:-1]) and len(found) >= len(ids) - 1


def _write(directory: Path, num_logits: int, script: Sequence[int]) -> None:
    """Write a model whose hidden state holds the bits of the next id, by which the logits' matrix finds its row.

    The logits are a plain product, so that GenAI computes them for the last id of a prompt alone.
    """
    blank = directory / "blank"
    blank.mkdir()
    write_blank_model(blank, num_logits)
    model: Any = openvino.Core().read_model(blank / "openvino_model.xml")
    logits = model.get_results()[0].input_value(0)
    position = next(node for node in model.get_parameters() if node.get_friendly_name() == "position_ids")
    hidden = logits.get_node().input_value(0)  # the attention layer's, without which GenAI takes no model
    bits = _bits(np.arange(num_logits))
    last = ops.minimum(position, np.int64(len(script) - 1))
    wanted = ops.gather(_SURE * bits[[*script]], last, np.int64(0))
    nothing = np.zeros((num_logits, hidden.get_partial_shape()[-1].get_length()), np.float32)
    found = ops.matmul(ops.concat([hidden, wanted], -1), np.hstack([nothing, bits]), False, True)
    scripted = openvino.Model([ops.result(found)], model.get_sinks(), model.get_parameters(), "scripted")
    logits.get_node().output(0).set_names(set())
    scripted.outputs[0].get_tensor().set_names({"logits"})
    openvino.save_model(scripted, directory / "openvino_model.xml", compress_to_fp16=False)


def _bits(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The binary digits of each id as 1 and -1: a row's product with itself is greater than with any other."""
    return np.where(ids[:, None] >> np.arange(int(ids.max()).bit_length()) & 1, np.float32(1), np.float32(-1))
