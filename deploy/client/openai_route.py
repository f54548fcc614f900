"""The endpoint's OpenAI route, for any client of that API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deploy.client.errors import NotSent


@dataclass(frozen=True)
class OpenAIRoute:
    """Base URL and token of the route.

    Attributes:
        base_url: ends in /openai/v1; its only operation is chat/completions.
        token: a call returns a valid token.
    """

    base_url: str
    token: Callable[[], str]

    def client(self, *, asynchronous: bool = False, **options: Any) -> Any:
        """Return a client of the `openai` package.

        Raises:
            NotSent: the package is not installed.
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
