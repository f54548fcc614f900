"""Checks a client's schema or grammar before an SGLang server gets it. Runs in the sandbox (`engines.process.sandbox`).

SGLang compiles a grammar on another thread, but computes the allowed tokens of each step on the scheduler's thread.
Meanwhile, all requests of this scheduler wait.

Sources: SGLang 0.5.23 (sglang/srt/constrained/grammar_manager.py, constrained/xgrammar_backend.py,
sampling/sampling_batch_info.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from importlib.util import find_spec
from typing import Any

from handler.core.values import Sampling, StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.openai.client import HttpClient, ask_each
from handler.engines.openai.sglang.api import native
from handler.engines.remote.sglang import guide
from handler.engines.structured_output.xgrammar import XgrammarCheck, ignored_keyword

_XGRAMMAR = "xgrammar"
_KINDS = {"json_schema": "JSON", "regex": "REGEX", "ebnf": "EBNF", "structural_tag": "STRUCTURAL_TAG"}
"""Maps each of SGLang's parameters for structured output to the kind of its text; see `XgrammarCheck`."""


class SglangCheck:
    """Checks structured output for SGLang with the installed xgrammar; see `StructuredOutputCheck`."""

    def __init__(self, config: EngineConfig) -> None:
        trusts_code = bool(config.engine_options.get("trust_remote_code"))
        self._check = XgrammarCheck(config.model_path, trust_remote_code=trusts_code)

    def __call__(self, structured_output: StructuredOutput) -> None:
        """Check that xgrammar enforces a schema or grammar.

        Raises:
            ValueError: xgrammar does not support the schema or grammar, ignores one of its keywords, or would take too
                long. SGLang 0.5.21 and later versions refuse some of the ignored keywords themselves.
        """
        ((name, text),) = guide(Sampling(structured_output=structured_output), "ebnf").items()
        if keyword := ignored_keyword(structured_output):
            raise ValueError(f"xgrammar does not enforce the schema's {keyword}: remove it")
        self._check(_KINDS[name], text)


def uses_xgrammar(urls: Sequence[str]) -> bool:
    """Return whether xgrammar is installed here, and one of the servers uses it. This blocks for up to 5 s.

    A server that does not respond counts as one that uses xgrammar, which is SGLang's default.
    """
    if find_spec(_XGRAMMAR) is None:
        return False

    def ask(client: HttpClient, url: str) -> Awaitable[Any]:
        return client.document(f"{native(url)}/server_info", f"{native(url)}/get_server_info")

    backends = (isinstance(report, dict) and report.get("grammar_backend") for report in ask_each(urls, ask))
    return any((backend or _XGRAMMAR) == _XGRAMMAR for backend in backends)
