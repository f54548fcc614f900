"""Finds the token ids of a request's labels, and the part of its prompt that other requests may share."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from handler.core.errors import InvalidParameter, ServingError
from handler.core.text import Prompt
from handler.core.values import Request, TemplateOptions
from handler.engines.base import Tokenizer

_MAX_TAIL = 32  # tokens at the end of a prompt that can affect how a label is encoded
_MAX_ADDED = 64  # bytes that the pieces of a prompt's end may have in addition to its text
_MAX_CACHED = 256  # combinations of a prompt's end and labels

_REPLY = "Yes"
_CHAT = ({"role": "user", "content": "Is it?"}, {"role": "assistant", "content": _REPLY})
_WITHOUT_PROMPT = TemplateOptions(add_generation_prompt=False)


class LabelEncoder:
    """Encodes the labels of requests. Thread-safe.

    Args:
        tokenizer: the tokenizer of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cached_ids = functools.lru_cache(_MAX_CACHED)(self._ids_after)

    def encode(self, request: Request, prompt: Prompt) -> Request:
        """Return the request with `Pooling.label_ids` and `Pooling.num_shared`.

        Raises:
            InvalidParameter: a label is not a single token after the prompt, or two labels are the same token.
        """
        pooling = request.pooling
        assert pooling is not None, "the request has labels"
        labels, vocabulary = pooling.labels, prompt.vocabulary
        if self._tokenizer.vocabulary is None:  # each prompt numbers its words, so the labels get the next numbers
            ids: Sequence[int | None] = range(len(vocabulary), len(vocabulary) + len(labels))
        else:
            ids = self._cached_ids(tail_of(prompt), labels)
        encoded: dict[int, str] = {}
        for label, id in zip(labels, ids, strict=True):
            if id is None:
                raise InvalidParameter(
                    f"{request.names.prompt}: the label {label!r} is not a single token of the model"
                )
            if id in encoded:
                raise InvalidParameter(
                    f"{request.names.prompt}: the labels {encoded[id]!r} and {label!r} are the same token of the model"
                )
            encoded[id] = label
        num_shared = _num_shared(prompt, pooling.suffix)
        return request._replace(pooling=pooling._replace(label_ids=tuple(encoded), num_shared=num_shared))

    def _ids_after(self, tail: tuple[int, ...], labels: tuple[str, ...]) -> Sequence[int | None]:
        """Return the id of the only token that each label adds after `tail`, or None for other labels.

        As in vLLM, a label counts only if it leaves the tokens before it unchanged
        (vllm/entrypoints/generate/label_reads.py). Labels begin with the template's space if all of them are then
        single tokens.
        """
        text, before = self._context(tail)
        ids: Sequence[int | None] = (None,) * len(labels)
        for space in dict.fromkeys((self._space, "") if before is not None else ()):
            ids = tuple(_added(before or [], self._tokenizer.encode(f"{text}{space}{label}").ids) for label in labels)
            if None not in ids and len({*ids}) == len(ids):
                break
        return ids

    def _context(self, tail: tuple[int, ...]) -> tuple[str, list[int] | None]:
        """Return the text at the end of the prompt, and its ids. The ids are None if encoding the text gives others.

        The text begins with the prompt's last special token, because some tokenizers add a space only to the beginning
        of a text. It is dropped if the tokenizer encodes it as plain text, as Mistral's own tokenizer does.
        """
        vocabulary = self._tokenizer.vocabulary
        assert vocabulary is not None, "the model has a vocabulary"
        text = ""
        for ids in (tail, tail[1:]):
            text = vocabulary.decode(ids)
            before = self._tokenizer.encode(text).ids
            if ids and ids[0] in vocabulary.special and ids[0] not in before:
                continue
            # The last id may be an end token that the tokenizer adds.
            return text, before if not ids or ids[-1] in before[-2:] else None
        return text, None

    @functools.cached_property
    def _space(self) -> str:
        """A space if the chat template writes one between a prompt and its reply, as Mistral's does, otherwise ""."""
        try:
            prompt = self._tokenizer.encode_chat(_CHAT[:1]).text
            chat = self._tokenizer.encode_chat(_CHAT, options=_WITHOUT_PROMPT).text
        except ServingError:  # the template refuses such a chat
            return ""
        return " " if chat.startswith(f"{prompt} {_REPLY}") else ""


def tail_of(prompt: Prompt) -> tuple[int, ...]:
    """Return the last ids of a prompt, beginning with its last special token."""
    last = prompt.ids[-_MAX_TAIL:]
    special = prompt.vocabulary.special
    start = next((at for at in range(len(last), 0, -1) if last[at - 1] in special), 1)
    return tuple(last[start - 1 :])


def _added(before: list[int], after: list[int]) -> int | None:
    """Return the only id that `after` has in addition to `before`, or None if there are other differences."""
    pairs = enumerate(zip(before, after, strict=False))
    at = next((at for at, (first, second) in pairs if first != second), len(before))
    return after[at] if after[at + 1 :] == before[at:] and len(after) > at else None


def _num_shared(prompt: Prompt, suffix: str) -> int:
    """Return the number of tokens before the last occurrence of `suffix`, or 0 if its text was changed.

    The tokens are searched from the end, so the result does not depend on the questions of other requests.
    """
    start = prompt.text.rfind(suffix) if suffix else -1
    if start < 0:
        return 0
    num_bytes = len(prompt.text[start:].encode()) + _MAX_ADDED
    pieces = list[bytes]()
    for id in reversed(prompt.ids):
        pieces.append(prompt.vocabulary.pieces[id])
        num_bytes -= len(pieces[-1])
        if num_bytes <= 0:
            break
    before = b"".join(reversed(pieces)).rfind(suffix.encode())  # bytes of the pieces before the suffix
    if before < 0:  # the tokenizer has changed the text
        return 0
    num_shared = len(prompt.ids) - len(pieces)
    for piece in reversed(pieces):
        before -= len(piece)
        if before < 0:
            break
        num_shared += 1
    return min(num_shared, len(prompt.ids) - 1)
