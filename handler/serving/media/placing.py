"""Put decoded images into a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.media import Image, MediaTokens, SharedMedia
from handler.core.text import Prompt
from handler.core.values import Request
from handler.engines.huggingface.image_tokens import expand


def place_media(request: Request, prompt: Prompt, media: Sequence[Image], tokens: MediaTokens | None) -> Prompt:
    """Return the prompt with its images, and with as many ids for each as the engine computes.

    Args:
        prompt: has one placeholder an image.
        media: one for each of the request's sources.
        tokens: the model's.

    Raises:
        InvalidPayload: the model does not take these images here.
        InvalidParameter: the prompt would be cut.
    """
    if tokens is None:
        raise InvalidPayload("'messages': the model takes no images")
    if request.truncation is not None:
        raise InvalidParameter("truncate_prompt_tokens: a prompt with images is not cut")
    counts = []
    for source, image in zip(request.media, media, strict=True):
        try:
            counts.append(tokens.count(image.width, image.height))
        except ValueError as error:
            raise InvalidPayload(f"{source.name}: {error}") from None
    try:
        ids = expand(prompt.ids, tokens.placeholder, counts)
    except ValueError as error:
        raise InvalidPayload(f"'messages': {error}") from None
    return prompt._replace(ids=ids, media=SharedMedia(prompt.text, media))
