"""vLLM without a server: `vllm.LLM.generate`, all requests of a round at once, in its own process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from handler.engines.base import EngineConfig
from proof.bench.processes import WARM_UP_PROMPT, WARM_UP_TOKENS, Worker
from systems import vllm_settings
from systems.base import Sample, Work

_GRACE = 30.0  # seconds


@dataclass
class Offline:
    """See `base.System`; the other end of `_process`."""

    pid: int
    about: Mapping[str, str]
    worker: Worker

    def measure(self, work: Work) -> Sample:
        self.worker.send(work)
        return Sample(*self.worker.receive())


@contextlib.contextmanager
def offline(config: EngineConfig, num_devices: int, *, chat: bool) -> Iterator[Offline]:
    # No daemon: vLLM starts its core from there.
    worker = Worker("vLLM without a server", _process, config, num_devices, chat, daemon=False)
    try:
        yield Offline(worker.pid, worker.receive(), worker)
    finally:
        worker.close(_GRACE)


# -- in its process --------------------------------------------------------------------------------------------------


def _process(pipe: Connection, config: EngineConfig, num_devices: int, chat: bool) -> None:
    os.environ.update(vllm_settings.environment(config))
    import vllm

    llm = vllm.LLM(**vllm_settings.keywords(config, num_devices))
    pipe.send({"version": vllm.__version__, **_settings(llm)})
    while True:
        try:
            work = pipe.recv()
        except EOFError:
            llm.llm_engine.engine_core.shutdown()
            return
        run(llm, replace(work, rounds=1, tokens=WARM_UP_TOKENS, first=WARM_UP_PROMPT), chat)
        pipe.send(run(llm, work, chat))


def _settings(llm: Any) -> dict[str, str]:
    """Return vLLM's settings with the given options."""
    config = llm.llm_engine.vllm_config
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": str(config.model_config.max_model_len),
        "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
        "max_num_seqs": str(config.scheduler_config.max_num_seqs),
        "async_scheduling": str(config.scheduler_config.async_scheduling),
        "prefix_caching": str(config.cache_config.enable_prefix_caching),
        "enforce_eager": str(config.model_config.enforce_eager),
        "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
    }


def run(llm: Any, work: Work, chat: bool) -> tuple[int, float]:
    """Return tokens and seconds. Prompts are encoded before, as the engine alone is measured."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    texts = work.prompts()
    if chat:
        lay_out = tokenizer.apply_chat_template
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [lay_out(messages, tokenize=False, add_generation_prompt=True) for messages in chats]
    prompts = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=not chat)} for text in texts]
    params = SamplingParams(temperature=0.0, max_tokens=work.tokens, ignore_eos=True, logprobs=None if chat else 0)
    began = time.monotonic()
    outputs = []
    for first in range(0, len(prompts), work.clients):
        outputs += llm.generate(prompts[first : first + work.clients], params, use_tqdm=False)
    seconds = time.monotonic() - began
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if set(lengths) != {work.tokens}:
        raise RuntimeError(f"vLLM ended answers early: {sorted(set(lengths))} tokens, not {work.tokens}")
    return sum(lengths), seconds
