"""Measures with AIPerf's own command, as its users do, and gives what it exports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

from common import main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # HF_HUB_OFFLINE has AIPerf take the tokenizer's path for a hub's name


class AIPerf:
    """`prompt` is the model's name; options: `requests`, `clients`, `tokens`, `key`."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            _save_tokenizer(f"{folder}/tokenizer")
            done = subprocess.run(
                _command(url, prompt, options, folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=400,
                cwd=folder,
                env={**os.environ, **_NOWHERE, "HOME": folder},
            )
            if done.returncode:
                raise RuntimeError(f"aiperf ended with status {done.returncode}:\n{done.stdout[-3000:]}")
            return json.loads(next(Path(folder).rglob("profile_export_aiperf.json")).read_text())

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Awaitable[Any]:
        raise NotImplementedError

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


def _command(url: str, model: str, options: dict[str, Any], folder: str) -> list[str]:
    command = {
        "--model": model,
        "--url": url,
        "--endpoint-type": "chat",
        "--tokenizer": f"{folder}/tokenizer",
        "--request-count": options["requests"],
        "--concurrency": options["clients"],
        "--isl": 40,
        "--osl": options["tokens"],
        "--random-seed": 7,
        "--artifact-dir": f"{folder}/found",
        "--ui": "none",
        "--extra-inputs": "ignore_eos:true",
        "--workers-max": 1,
        **({"--api-key": options["key"]} if "key" in options else {}),
    }
    flags = ["--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"]
    aiperf = str(Path(sys.executable).with_name("aiperf"))
    return [aiperf, "profile", *(str(part) for pair in command.items() for part in pair), *flags]


def _save_tokenizer(folder: str) -> None:
    """One token a byte: AIPerf makes its prompts with a tokenizer, and no hub is asked for one."""
    alphabet = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


main(AIPerf())
