"""Put decoded media into a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.media import MEDIA, MediaTokens, Medium, SharedMedia, several
from handler.core.text import Prompt
from handler.core.values import Request
from handler.engines.huggingface.media_tokens import expand


def place_media(request: Request, prompt: Prompt, media: Sequence[Medium], tokens: Mapping[str, MediaTokens]) -> Prompt:
    """Return the prompt with its media, and with as many ids for each as the engine computes.

    Args:
        prompt: has one placeholder a medium.
        media: one for each of the request's sources.
        tokens: the model's, by kind.

    Raises:
        InvalidPayload: the model does not take these media here.
        InvalidParameter: the prompt would be cut.
    """
    for medium in media:
        if medium.kind not in tokens:
            raise InvalidPayload(f"'messages': the model takes no {MEDIA[medium.kind]}")
    if request.truncation is not None:
        kinds = several(medium.kind for medium in media)
        raise InvalidParameter(f"truncate_prompt_tokens: a prompt with {kinds} is not cut")
    counts: dict[str, list[int]] = {}
    for source, medium in zip(request.media, media, strict=True):
        try:
            counts.setdefault(medium.kind, []).append(tokens[medium.kind].count(medium.size))
        except ValueError as error:
            raise InvalidPayload(f"{source.name}: {error}") from None
    try:
        ids = expand(prompt.ids, counts, tokens)
    except ValueError as error:
        raise InvalidPayload(f"'messages': {error}") from None
    return prompt._replace(ids=ids, media=SharedMedia(prompt.text, media))
