"""OpenAI's bodies and other routes in the API's document."""

from __future__ import annotations

from collections.abc import Mapping

from handler.protocols.kernel.parameters import Description, request_shape
from handler.protocols.openai import audio, completions, embeddings
from handler.protocols.openai.api import (
    EmbeddingAnswer,
    OpenAiChatAnswer,
    OpenAiChatChunk,
    OpenAiError,
    OpenAiTextAnswer,
    OpenAiTextChunk,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    VerboseTranscription,
)
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.request import CHAT, COMPLETIONS

_HEAD = {"id": "cmpl-0", "created": 1760000000, "model": "model", "system_fingerprint": "lmi"}
_USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
_ANSWER_MESSAGE = {"role": "assistant", "content": "Paris.", "refusal": None}


def _transcription(title: str, request: str, task: str) -> Description:
    return Description(
        title, request, request_shape(audio.FIELDS, audio.TABLES[task], "file"), OpenAiError,
        {"model": "", "file": _SILENCE},
        Transcription | VerboseTranscription,
        {"text": "Good morning.",
         "usage": {"type": "tokens", "input_tokens": 4, "output_tokens": 3, "total_tokens": 7}},
        TranscriptDelta | TranscriptDone | OpenAiError, ("text/event-stream",),
        forms=True,
        texts=True,
    )  # fmt: skip


_SILENCE = "UklGRjQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YRAAAAAAAAAAAAAAAAAAAAAAAAAA"
"""A WAV of one millisecond."""

DESCRIPTIONS: Mapping[str, Description] = {
    "openai_chat": Description(
        "OpenAI chat", "OpenAiChatRequest", request_shape(OpenAiChat.fields, CHAT, "messages"), OpenAiError,
        {"model": "", "messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16},
        OpenAiChatAnswer,
        {**_HEAD, "object": "chat.completion", "usage": _USAGE,
         "choices": [{"index": 0, "message": _ANSWER_MESSAGE, "logprobs": None, "finish_reason": "stop"}]},
        OpenAiChatChunk | OpenAiError, ("text/event-stream",),
    ),
    "openai_completions": Description(
        "OpenAI completions", "OpenAiCompletionRequest", request_shape(completions.FIELDS, COMPLETIONS, "prompt"),
        OpenAiError,
        {"model": "", "prompt": "The capital of France is", "max_tokens": 8},
        OpenAiTextAnswer,
        {**_HEAD, "object": "text_completion", "usage": _USAGE,
         "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}]},
        OpenAiTextChunk | OpenAiError, ("text/event-stream",),
    ),
    "openai_embeddings": Description(
        "OpenAI embeddings", "OpenAiEmbeddingRequest", request_shape(embeddings.FIELDS, embeddings.TABLE, "input"),
        OpenAiError,
        {"model": "", "input": ["What is deep learning?"]},
        EmbeddingAnswer,
        {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}], "model": "model",
         "usage": {"prompt_tokens": 7, "total_tokens": 7}},
    ),
    "openai_transcriptions": _transcription("OpenAI transcription", "OpenAiTranscriptionRequest", "transcribe"),
    "openai_translations": _transcription("OpenAI translation", "OpenAiTranslationRequest", "translate"),
}  # fmt: skip
"""By the dialect's name."""
