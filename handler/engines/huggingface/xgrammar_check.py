"""Tries structured output with the installed xgrammar and a checkpoint's vocabulary."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from handler.engines.structured_output.ebnf import acyclic
from handler.engines.structured_output.expressions import Walker
from handler.engines.structured_output.xgrammar import ebnf, has_own_rules, said


class XgrammarCheck:
    """Compiles texts and makes the masks of their first tokens, as an engine would.

    Args:
        model: a directory with a tokenizer.
    """

    def __init__(self, model: Path, *, trust_remote_code: bool = False) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=trust_remote_code)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._walker = Walker(
            tokenizer.get_vocab(),
            info.vocab_size,
            xgrammar.allocate_token_bitmask(1, info.vocab_size),
            lambda matcher, mask: matcher.fill_next_token_bitmask(mask),
            lambda matcher, id: matcher.accept_token(id) and not matcher.is_terminated(),
        )

    def __call__(self, kind: str, text: str) -> None:
        """Try a text.

        Args:
            kind: as in `xgrammar_rules.ebnf`.

        Raises:
            ValueError: a rule is cyclic, xgrammar cannot follow the text, or a step takes too long.
        """
        written = ebnf(kind, text)
        rules = acyclic(written)
        self._walker.start(self._matchers(written))
        if has_own_rules(kind, text):
            for abridged in rules.abridged():
                self._walker.abridged(self._matchers(abridged))

    def _matchers(self, rules: str) -> Any:
        try:
            return partial(self._xgrammar.GrammarMatcher, self._compiler.compile_grammar(rules))
        except Exception as error:
            raise ValueError(said(error)) from None
