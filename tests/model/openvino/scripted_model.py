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

_SURE = 50.0  # logits beyond those of the other tokens
_SCRIPT = 128  # ids, after which another script begins: a line costs the logits of all ids before it


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
    blank = directory / "blank"
    blank.mkdir()
    write_blank_model(blank, num_logits)
    model: Any = openvino.Core().read_model(blank / "openvino_model.xml")
    logits = model.get_results()[0].input_value(0)
    position = next(node for node in model.get_parameters() if node.get_friendly_name() == "position_ids")
    last = ops.minimum(position, np.int64(len(script) - 1))
    wanted = ops.gather(np.array(script, dtype=np.int64), last, np.int64(0))
    sure = ops.one_hot(wanted, np.int64(num_logits), np.float32(_SURE), np.float32(0), -1)
    # Whatever is not plain: GenAI would take the last place alone from before the product, and not from what is added.
    found = ops.add(ops.relu(logits), sure)
    scripted = openvino.Model([ops.result(found)], model.get_sinks(), model.get_parameters(), "scripted")
    logits.get_node().output(0).set_names(set())
    scripted.outputs[0].get_tensor().set_names({"logits"})
    openvino.save_model(scripted, directory / "openvino_model.xml", compress_to_fp16=False)
