"""The endpoint's OpenAI route, which any client of that API can use (contract sagemaker.md, section 1.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deploy.client.errors import NotSent


@dataclass(frozen=True)
class OpenAIRoute:
    """Where it is, and how to get in.

    Attributes:
        base_url: ends in /openai/v1; only chat/completions is there.
        token: called, it gives a key that is good now.
    """

    base_url: str
    token: Callable[[], str]

    def client(self, *, asynchronous: bool = False, **options: Any) -> Any:
        """A client of the `openai` package.

        Raises:
            NotSent: it is not installed.
        """
        try:
            import openai
        except ImportError:
            raise NotSent(
                "the openai package is not installed",
                "pip install openai; or give any client openai_route().base_url and openai_route().token().",
            ) from None
        options = {"max_retries": 0, **options}
        if not asynchronous:
            return openai.OpenAI(base_url=self.base_url, api_key=self.token, **options)

        async def token() -> str:
            return self.token()

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=token, **options)
