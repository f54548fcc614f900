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

ANSWER = """A string is a sequence, so a **slice** with the step -1 reverses it:

```python
def reverse(text: str) -> str:
    return text[::-1]
```

| text | reversed |
|---|---|
| `abc` | `cba` |
| `level` | `level` |
"""


@contextmanager
def chat(browser: Browser, url: str, width: int, height: int, scheme: Any) -> Iterator[Chat]:
    phone: dict[str, Any] = {"is_mobile": True, "has_touch": True} if width < 500 else {}
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, **phone)
    page.goto(url)
    yield Chat(page)
    page.close()


def main(directory: Path) -> None:
    with serve("--engine", "echo") as server, sync_playwright() as playwright:
        server.wait_ready()
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        with chat(browser, server.url, 390, 844, "light") as phone:
            phone.page.screenshot(path=directory / "start-390.png")
        with chat(browser, server.url, 390, 844, "dark") as phone:
            phone.ask("What is the weather in Paris?")
            phone.feed({"reasoning": "The user wants the weather.\nI call the tool."})
            phone.feed(call(0, "get_weather", '{"city": "Paris"}', id="call_a"))
            phone.end("tool_calls")
            phone.page.click("summary:has-text('Thought')")
            phone.page.screenshot(path=directory / "thoughts-and-tools-390.png")
        with chat(browser, server.url, 768, 1024, "dark") as tablet:
            tablet.ask("Write a Python function that reverses a string.")
            tablet.feed(ANSWER[:120])
            tablet.page.screenshot(path=directory / "mid-stream-768.png")
        with chat(browser, server.url, 1280, 800, "light") as desktop:
            desktop.ask("Write a Python function that reverses a string.")
            desktop.feed(ANSWER)
            desktop.end()
            desktop.ask("And in Rust?")
            desktop.feed("In Rust, a string is UTF-8, so")
            desktop.end(finish=None)
            desktop.page.screenshot(path=directory / "answer-and-failure-1280.png")
        with chat(browser, server.url, 2560, 1300, "dark") as large:
            large.ask("Write a Python function that reverses a string.")
            large.feed(ANSWER)
            large.end()
            large.page.click("#tab-javascript")
            large.page.screenshot(path=directory / "answer-2560.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
