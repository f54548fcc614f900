"""Draw the chat page's pictures: `python -m tests.browser.screenshots docs/images/page`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.browser.conftest import chromium
from tests.browser.test_answers import Chat, call
from tests.servers import serve

ANSWER = r"""A string is a sequence, so a **slice** with the step -1 reverses it:

```python
def reverse(text: str) -> str:
    return text[::-1]  # a slice
```

| Way | Code | Time for $n$ characters |
|---|---|---|
| slice | `text[::-1]` | $O(n)$, one copy |
| join | `"".join(reversed(text))` | $O(n)$, slower by a constant |
| sum | `for c in text: out = c + out` | up to $\sum_{i=1}^{n} i = \frac{n(n+1)}{2}$ |
"""


@contextmanager
def chat(browser: Browser, url: str, width: int, height: int, scheme: Any) -> Iterator[Chat]:
    phone: dict[str, Any] = {"is_mobile": True, "has_touch": True} if width < 500 else {}
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, **phone)
    page.goto(url)
    yield Chat(page)
    page.close()


def ask(chat: Chat, question: str, answer: str) -> None:
    chat.ask(question)
    chat.feed(answer)
    chat.end()


def main(directory: Path) -> None:
    with (
        serve("--engine", "echo", "-o", "option.model_name=SmolLM2-1.7B-Instruct") as server,
        sync_playwright() as driver,
    ):
        server.wait_ready()
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        with chat(browser, server.url, 1280, 800, "light") as desktop:
            for question in ("Name the capital of France.", "Give me three tips for better sleep."):
                ask(desktop, question, "Done.")
                desktop.page.click("#clear")
            ask(desktop, "Write a Python function that reverses a string.", ANSWER)
            desktop.page.screenshot(path=directory / "chat-1280.png")
        with chat(browser, server.url, 390, 844, "dark") as phone:
            phone.ask("What is the weather in Paris?")
            phone.feed({"reasoning": "The user wants the weather.\nI call the tool."})
            phone.feed(call(0, "get_weather", '{"city": "Paris"}', id="call_a"))
            phone.end("tool_calls")
            phone.page.click("summary:has-text('Thought')")
            phone.page.screenshot(path=directory / "reasoning-and-tools-390.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
