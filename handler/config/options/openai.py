"""Options of the engine that is a server of OpenAI's API."""

from __future__ import annotations

from urllib.parse import urlsplit

from handler.config.options.option import Option, number, one_of, string

_OPENAI = ("openai",)


def urls(text: str) -> tuple[str, ...]:
    """Parse addresses separated by commas."""
    found = tuple(name.strip().rstrip("/") for name in text.split(","))
    for url in found:
        parts = urlsplit(url)
        is_whole = parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)  # `port` may raise
        if parts.scheme not in ("http", "https") or not is_whole:
            raise ValueError("must be http or https addresses separated by commas: http://host:8000/v1")
        if parts.username or parts.password:
            raise ValueError("must hold no password; the key is read from the variable OPENAI_API_KEY")
    return found


OPENAI = (
    Option("option.base_url", "base_url", urls, None, "address of the server, such as http://host:8000/v1; several, comma-separated, are replicas (engines-by-url.md)", engines=_OPENAI),
    Option("option.base_url_kind", "base_url_kind", one_of("auto", "vllm", "dynamo", "lmi"), "auto", "what the server is; auto: what its /models says when this one starts; lmi: this handler", engines=_OPENAI),
    Option("option.base_url_model", "base_url_model", string, None, "the model's name there; by default the first in /models", engines=_OPENAI),
    Option("option.base_url_connect_timeout", "base_url_connect_timeout", number(0.1), 5.0, "seconds to connect", engines=_OPENAI),
    Option("option.base_url_timeout", "base_url_timeout", number(0.1), 120.0, "seconds without a token after which a request fails", engines=_OPENAI),
)  # fmt: skip
