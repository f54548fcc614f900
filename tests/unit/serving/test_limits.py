"""Limits that users meet: the documents say the numbers by which the code goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from handler.http import server
from handler.protocols.kernel import dialect, errors, messages, readers, texts
from handler.protocols.responses import request
from handler.scheduler import batcher, lora
from handler.serving import (
    admission,
    encoder,
    forms,
    large_bodies,
    quota,
    request_log,
    sessions,
    start,
)
from handler.serving.batches import runner
from handler.serving.media import audio, image_decoder, loader

DOCUMENTS = Path(__file__).parents[3] / "docs"
MIB = 1 << 20
NUMBERS = {3: "three", 10: "ten"}
LIMITS: dict[str, list[str]] = {
    "wire/README.md": [
        f"random, from {errors._WAIT[0]:g} to {errors._WAIT[1]:g} s",
        f"bodies of {large_bodies.LARGE // MIB} MiB or more",
        f"{large_bodies.MAX_VALUES:,} strings, names, lists and objects in total",
        f"{large_bodies.MAX_NUMBERS:,} numbers",
        f"{large_bodies.MAX_TEXT:,} characters in each string",
        f"{large_bodies.SECONDS:g} s of CPU time for parsing",
        f"{large_bodies._MEMORY / MIB:g} MiB of memory for parsing, plus {large_bodies._MEMORY_FACTOR} bytes for each",
        f"{messages.MAX_ARGUMENTS:,} characters in the arguments of one tool call, and "
        f"{messages.MAX_ALL_ARGUMENTS:,} in those of all",
        f"At most {large_bodies.MAX_WAITING} such requests are parsed or tokenized at a time",
        f"if their bodies are at most {large_bodies._QUICK_BODY / MIB:g} MiB",
        f"reserved for requests of up to {admission._SMALL / (1 + quota.BODY_MEMORY) / 1024:g} KiB",
    ],
    "images.md": [
        f"images in a request | {dialect.DEFAULT_MAX_MEDIA} |",
        f"CPU time to decode an image | {loader.SECONDS:g} s",
        f"files fetched at a time | {loader.FETCHES}, at most {loader._FETCHES_OF_HOST} from one host",
        f"{loader.MAX_MEDIA_LOADING:,}, then 503. Requests with at most {loader._FEW_MEDIA} images may use "
        f"{loader._SPARE_MEDIA:,} more",
        f"{loader.MAX_MEMORY / (1 << 30):g} GiB, then 503. Requests that need at most "
        f"{loader._LITTLE_MEMORY / MIB:g} MiB may use {loader._SPARE_MEMORY / MIB:g} MiB more",
        f"over {image_decoder._MAX_EXIF / 1024:g} KiB of Exif is refused",
    ],
    "audio.md": [
        f"audio files in a request | {dialect.DEFAULT_MAX_MEDIA} |",
        f"samples per second and channel | {audio._LEAST_RATE:,} to {audio._MOST_RATE:,} |",
        f"channels | 1 to {audio._MOST_CHANNELS} |",
        f"samples per second, all channels | {audio._MOST_PER_SECOND:,} |",
        f"CPU time to decode an audio file | {loader.SECONDS:g} s",
        f"tags with over {audio._MOST_TEXTS} texts are refused",
    ],
    "sessions.md": [
        f"are at most {sessions._LONGEST_CALL / 1024:g} KiB long",
        f"within {sessions._PERIOD:g} s of a session's end",
    ],
    "capture.md": [
        f"{request_log._MOST_WAITING / MIB:g} MiB are waiting to be written",
        f"in these {request_log._MOST_WAITING / MIB:g} MiB",
    ],
    "scaling.md": [f"open requests have {start._DRAIN:g} s to finish"],
    "serving.md": [f"Running requests have {server._DRAIN:g} s to finish"],
    "adapters.md": [f"at most {lora._MAX_CONFIG / MIB:g} MiB"],
    "wire/audio.md": [f"A form may have at most {forms._MOST_PARTS} parts"],
    "wire/batches.md": [
        f"up to {readers._PAIRS} pairs: keys of {readers._KEY} characters, values of {readers._VALUE}",
        f"`errors` names up to {runner._MOST_ERRORS} lines",
        f"after at most {NUMBERS[batcher.MAX_OVERTAKES]} others have overtaken it",
        f"waits for at most {batcher._PATIENCE:g} s while another key",
        f"If the engine fails {NUMBERS[runner._TRIES]} times on a line",
    ],
    "wire/tensors.md": [f"at most {encoder.MAX_LOGITS:,} logits"],
    "wire/responses.md": [f"at most {request.MAX_REFERENCES} in a request"],
    "wire/embeddings.md": [
        f"may contain up to {texts.MAX_TEXTS:,} texts",
        f"may be up to {texts.MAX_QUERIES:,} characters",
    ],
    "wire/lmi.md": [f"a string or up to {readers.MAX_STOPS}, each up to {readers.MAX_STOP_CHARACTERS:,} characters"],
    "wire/structured-output.md": [f"a value of at most {readers.MAX_CHARACTERS:,} characters"],
}


@pytest.mark.parametrize("page", LIMITS)
def test_the_documents_say_the_limits_of_the_code(page: str) -> None:
    text = re.sub(r"\s+", " ", (DOCUMENTS / page).read_text())
    missing = [limit for limit in LIMITS[page] if limit not in text]
    assert not missing, f"docs/{page} does not say so, or the code goes by other limits"
