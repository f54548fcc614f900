"""Asks as lm-eval's `local-completions` model does: its own requests, batches and parser."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import requests
from common import main
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

logging.disable(logging.WARNING)


class Model(LocalCompletionsAPI):
    """Its tokenizers want transformers, or vLLM's routes: the ids are asked of the server's /tokenize."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = url
        address = f"{url}/v1/completions"
        given = {"model": "model", "max_retries": 1, "eos_string": "<|im_end|>", **options}
        super().__init__(base_url=address, tokenizer_backend="none", **given)
        self.tokenizer = self  # only looked at for being there
        self.tokenized_requests = True

    def tok_encode(self, string: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(string, str):
            return [self.tok_encode(each) for each in string]
        answer = requests.post(f"{self._url}/tokenize", json={"inputs": string}, timeout=100)
        return [token["id"] for token in answer.json()]


class LmEval:
    """A prompt's `pairs` are (context, continuation), or with `until` contexts to go on from."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        pairs, until = options.pop("pairs"), options.pop("until", None)
        tokens = options.pop("tokens", 8)
        model = Model(url, options)
        if until is not None:
            asked = [(context, {"until": until, "max_gen_toks": tokens}) for (context,) in pairs]
            return model.generate_until(_instances("generate_until", asked), disable_tqdm=True)
        return model.loglikelihood(_instances("loglikelihood", [tuple(pair) for pair in pairs]), disable_tqdm=True)

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


def _instances(kind: Any, arguments: list[Any]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


main(LmEval())
