"""Finds out whether a llama-server has the tokenizer of the model's files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import orjson

from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.llamacpp.media import Tokenize, tokenized
from handler.engines.remote.servers import Failed, Lasting, Refused

_TEXT = "The quick brown fox isn't 12345 or 6.7e-8:\n\n\tdef f(x):\n        return [x, 'Ça va? 你好,世界 Привет 😀']\n"
"""Words, digits, spaces and characters that tokenizers divide in different ways."""
_MAX_MARKERS = 32
_SHOWN = 8  # tokens in a message
_NO_SUCH_ID = "answered 500"
"""The failure of /detokenize if an id is outside the vocabulary."""


class Probe(NamedTuple):
    """A text that is tokenized to compare tokenizers.

    Attributes:
        text: the text.
        ids: its ids in the model's files.
        decoded: the text of these ids, which may begin with a space.
    """

    text: str
    ids: Sequence[int]
    decoded: str

    @classmethod
    def of(cls, tokenizer: HfTokenizer) -> Probe:
        """Return a probe with the special tokens that the chat template contains."""
        markers = sorted(text for text in tokenizer.vocabulary.marks if text and text in tokenizer.chat_template)
        text = _TEXT + "".join(markers[:_MAX_MARKERS])
        ids = tokenizer.ids(text)
        return cls(text, ids, tokenizer.vocabulary.decode(ids))

    async def difference(self, tokenize: Tokenize, detokenize: Tokenize) -> str:
        """Return how the server divides the text into other tokens of the same vocabulary; "" if it does not.

        Args:
            tokenize: function that sends a body to /tokenize, and returns the response.
            detokenize: the same for /detokenize.

        Raises:
            Failed: the server has another vocabulary, or fails.
        """
        try:
            ids = await tokenized(tokenize, self.text)
            if ids == list(self.ids):
                return ""
            text = await self._decoded(detokenize)
        except Refused as error:
            raise Failed(str(error), error.words) from None
        except Failed as error:
            if isinstance(error, Lasting):  # a program in front of the server does not pass these requests on
                return ""
            raise
        if text != self.decoded:
            words = f"it reads the token ids {list(self.ids[:_SHOWN])}, … as {text[:40]!r}, not {self.decoded[:40]!r}"
            detail = f"{words}; set option.model_id to the model that it serves"
            raise Lasting("has another tokenizer than option.model_id", detail)
        at = next((at for at, (id, expected) in enumerate(zip(ids, self.ids, strict=False)) if id != expected), 0)
        return f"it has {ids[at : at + _SHOWN]} instead of {list(self.ids[at : at + _SHOWN])}"

    async def _decoded(self, detokenize: Tokenize) -> str:
        """Return the server's text of the ids, or "" if it does not have all of them."""
        try:
            return _content(await detokenize({"tokens": list(self.ids)}))
        except Failed as error:
            if error.plain == _NO_SUCH_ID:
                return ""
            raise


def _content(data: bytes) -> str:
    """Read the response of /detokenize.

    Raises:
        Failed: it has no text.
    """
    try:
        return str(orjson.loads(data)["content"])
    except (ValueError, TypeError, KeyError) as error:
        raise Failed("sent a text that cannot be read", repr(error)) from None
