"""The class LLM: its constructor and `generate_async` (llmapi/llm.py of TensorRT-LLM 1.0 to 1.3)."""

from __future__ import annotations

import copy
import inspect
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorrt_llm import inputs as vision
from tensorrt_llm._double import workers
from tensorrt_llm._double.api import API, MANNERS, EngineDeadError, RequestError, misuse
from tensorrt_llm._double.engine import Engine, FastEngine
from tensorrt_llm._double.model import Model
from tensorrt_llm._double.request import Request
from tensorrt_llm._double.result import GenerationResult
from tensorrt_llm.llm_args import checked
from tensorrt_llm.sampling_params import SamplingParams


class RequestOutput(GenerationResult):  # type: ignore[misc]  # mypy takes it for the real package's
    """What generate_async gives; made by nobody else."""


class LLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        self.args: Any = checked(type(self).__name__, {**given, **kwargs})
        worker = workers.start()
        from transformers import AutoTokenizer

        self._tokenizer = None if skip_tokenizer_init else AutoTokenizer.from_pretrained(str(model))
        self.model = Model(Path(model), self._tokenizer)
        self.input_processor = vision.load(Path(model), self._tokenizer)
        kind = FastEngine if MANNERS.fast else Engine
        self.engine: Engine | None = kind(self.model, self.args, self._tokenizer, worker)
        # Without the LLM its engine stops, and pending results are waited for in vain.
        weakref.finalize(self, self.engine.shutdown)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def llm_id(self) -> str:
        return f"double-{os.getpid()}"

    @property
    def _executor(self) -> Any:
        """The executor: its `_error_queue` has what its threads have met, until somebody asks."""
        return None if self.engine is None else SimpleNamespace(_error_queue=self.engine.delivery.errors)

    def _generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        engine = self.engine
        if engine is not None and isinstance(engine.dead, EngineDeadError):
            raise engine.dead
        if engine is None or engine.shut:
            raise RuntimeError("LLM is shutting down")
        if sampling_params is None:
            sampling_params = SamplingParams()
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"Expected SamplingParams, got {type(sampling_params)}")
        ids, text, processed = self._read(inputs, sampling_params)
        if sampling_params._times_used:
            raise misuse("a SamplingParams was used twice: real versions keep in it what they wrote for the first use")
        sampling_params._times_used += 1
        sampling_params._setup(self._tokenizer, self.model.generation_config)
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        limit = self.args.max_num_tokens
        if not self.args.enable_chunked_prefill and limit is not None and len(ids) > limit:
            kind = RequestError if MANNERS.release >= (1, 2) else ValueError
            raise kind(f"The sum of prompt length ({float(len(ids))}) should not exceed max_num_tokens ({limit})")
        engine.raise_background_error()
        result = RequestOutput(engine=engine, params=sampling_params, prompt=ids, text=text, tokenizer=self._tokenizer)
        params = copy.copy(sampling_params)  # it goes to another process: later changes do not reach it
        tokens = list(ids) if processed is None else processed.tokens
        engine.submit(Request(0, tokens, params, streaming, result, lora_request, cache_salt, processed))
        return result

    def _read(self, inputs: Any, params: Any) -> tuple[list[int], str | None, vision.Processed | None]:
        """Ids, text, and what an input processor makes of a text: ids without images pass it by."""
        data = inputs.get("multi_modal_data") if isinstance(inputs, dict) else None
        if self.input_processor is None or isinstance(inputs, list):
            return *self._ids(inputs, params), None
        text: Any = inputs
        arguments: Any = {}
        if isinstance(inputs, dict):
            text, arguments = inputs.get("prompt"), inputs.get("mm_processor_kwargs", {})
            if not text and (ids := inputs.get("prompt_token_ids")):
                if not data:
                    return *self._ids(inputs, params), None
                assert self._tokenizer is not None
                text = self._tokenizer.decode(ids)  # and read again
                if MANNERS.release < (1, 3):
                    arguments = inputs.get("mm_processor_kwargs")
        if not isinstance(text, str):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        processed = self.input_processor(text, data, arguments)
        return processed.ids, text, processed

    def _ids(self, inputs: Any, params: Any) -> tuple[list[int], str | None]:
        if isinstance(inputs, list):
            if not isinstance(inputs[0], int):
                raise AssertionError("inputs is a list of something else than ids")
            return inputs, None
        text = inputs.get("prompt") if isinstance(inputs, dict) else inputs
        if isinstance(inputs, dict) and inputs.get("prompt_token_ids") is not None:
            return inputs["prompt_token_ids"], None
        if not isinstance(text, str):
            raise TypeError(f"Invalid type of inputs for llm.generate: {type(inputs)}")
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=params.add_special_tokens), text

    def __getattr__(self, name: str) -> Any:
        """`generate_async` has the parameters of the version that is played."""
        if name != "generate_async":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        bound = self._generate_async
        signature = inspect.signature(bound)
        names = [one["name"] for one in API["LLM.generate_async"]["params"]]
        there = signature.replace(parameters=[one for name, one in signature.parameters.items() if name in names])

        def generate_async(*args: Any, **kwargs: Any) -> RequestOutput:
            there.bind(*args, **kwargs)
            if len(args) > 1:
                raise misuse("past `inputs` the order of parameters differs between versions: name them")
            return bound(*args, **kwargs)

        generate_async.__signature__ = there  # type: ignore[attr-defined]
        return generate_async

    def generate(self, inputs: Any, sampling_params: Any = None, use_tqdm: bool = True, **more: Any) -> Any:
        if isinstance(inputs, tuple) or isinstance(sampling_params, tuple):
            raise TypeError("a batch is a list")
        if isinstance(inputs, list) and not isinstance(inputs[0], int):
            several = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(inputs)
            return [self.generate(one, params, use_tqdm, **more) for one, params in zip(inputs, several, strict=True)]
        return self.generate_async(inputs, sampling_params=sampling_params, **more).result()

    def shutdown(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise RuntimeError("LLM cannot be pickled")
