"""Reading TensorRT-LLM's result of a request while it grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy

from handler.core.values import Finish, Sampling
from handler.engines.base import EngineRequest
from handler.engines.trtllm.engine import TrtRequest


class Tensor:
    """A tensor [2, 3] with the methods of torch's that the engine calls."""

    def float(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return numpy.zeros((2, 3), numpy.float32)


def test_the_prompts_scores_wait_for_the_first_token() -> None:
    output = SimpleNamespace(token_ids=[], logprobs=[], finish_reason=None, stop_reason=None)
    result = SimpleNamespace(outputs=[output], context_logits=None)
    running = TrtRequest(EngineRequest(1, [1, 2], Sampling(prompt_logprobs=True)), result=result)
    assert running.outputs() == []
    result.context_logits = Tensor()
    assert running.outputs() == [], "the logits arrive before the first token"
    output.token_ids.append(2)
    (first,) = running.outputs()
    assert first.ids == [2]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 2
    output.token_ids.append(1)
    output.finish_reason = "length"
    (last,) = running.outputs()
    assert (last.ids, last.finish, last.prompt_logprobs) == ([1], Finish.LENGTH, None)
