"""Checks a client's schema or grammar before llama-server gets it. Runs in the sandbox (`engines.process.sandbox`)."""

from __future__ import annotations

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import load_tokenizer
from handler.engines.llamacpp.gbnf import read
from handler.engines.llamacpp.parameters import grammar
from handler.engines.llamacpp.schema import schema_grammar
from handler.engines.llamacpp.stacks import GrammarTrial, Sample, Stacks


class LlamaCheck:
    """A check that estimates how long llama.cpp would need for a token of the response; see `StructuredOutputCheck`.

    Args:
        config: configuration of the engine, with the model's tokenizer.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._sample = Sample(load_tokenizer(config).vocabulary.texts)

    def __call__(self, structured_output: StructuredOutput) -> None:
        """Check a schema or grammar.

        Raises:
            ValueError: llama-server does not support it, or would take too long.
        """
        field = grammar(structured_output)
        text = field.get("grammar") or schema_grammar(field["json_schema"]).text
        GrammarTrial(Stacks(read(text)), self._sample).check()
