"""Chats that the browser keeps: named, searched, exported, deleted, and what can go wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.test_answers import Chat
from tests.browser.test_page import ANSWER, ready, until
from tests.servers import LiveServer

pytestmark = pytest.mark.browser

TITLES = "#chats .open span"


def titles(page: Any) -> list[str]:
    return list(page.locator(TITLES).all_inner_texts())


def listed(page: Any, *wanted: str) -> None:
    until(
        page, f"JSON.stringify([...document.querySelectorAll('{TITLES}')].map((e) => e.textContent)) == {_js(wanted)}"
    )


def _js(values: Any) -> str:
    """A JSON text as a literal of JavaScript."""
    return json.dumps(json.dumps(list(values), ensure_ascii=False, separators=(",", ":")))


def ask(chat: Chat, question: str, answer: str) -> None:
    chat.ask(question)
    chat.feed(answer)
    chat.end()


def choose(page: Any, title: str, action: str) -> None:
    page.click(f"#chats li:has-text('{title}') .more")
    page.click(f"#chat-menu >> text={action}")


def file(page: Any, act: Any) -> tuple[str, str]:
    """The name and the text of what is downloaded."""
    with page.expect_download() as download:
        act()
    return download.value.suggested_filename, Path(download.value.path()).read_text()


@pytest.fixture
def chat(echo_server: LiveServer, open_page: Open) -> Chat:
    """Two chats: of strings, and of weather with reasoning and a call."""
    chat = Chat(open_page(echo_server))
    ask(chat, "Reverse a *string*", "Take `text[::-1]`.\n\n```py\nx\n```")
    chat.page.click("#clear")
    chat.ask("Weather?")
    chat.feed({"reasoning": "I look."}, "It is **sunny**.")
    chat.feed({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "time", "arguments": "{}"}}]})
    chat.end("tool_calls")
    listed(chat.page, "Weather?", "Reverse a *string*")
    return chat


def test_chats_are_kept_over_a_reload_and_go_on(chat: Chat) -> None:
    page = chat.page
    page.fill(f"{ANSWER} .call textarea", "noon")
    page.click("text=Send results")
    chat.asked(3)
    chat.feed("At noon.")
    chat.end()
    page.fill("#p-system", "Be brief.")
    ask(chat, "Thanks", "You are welcome.")
    page.wait_for_timeout(100)
    page.reload()
    again = Chat(page)
    until(page, "document.querySelectorAll('.turn').length == 5")
    assert page.inner_text(".thoughts") == "I look." or page.is_hidden(".thoughts")
    assert page.locator(".turn.assistant strong").inner_text() == "sunny"
    assert page.input_value("#p-system") == "Be brief."
    again.ask("And?")
    roles = [message["role"] for message in again.bodies[0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    assert again.bodies[0]["messages"][3] == {"role": "tool", "tool_call_id": "a", "content": "noon"}
    again.feed("Half")
    page.reload()  # while an answer comes
    ready(page)
    until(page, f"document.querySelector('{ANSWER}.broken .error')")
    assert page.inner_text(f"{ANSWER} .error").startswith("The page was closed before")


def test_chats_are_found_named_and_exported(chat: Chat) -> None:
    page = chat.page
    page.fill("#chats-search", "sunny WEATHER")
    assert titles(page) == ["Weather?"]
    page.fill("#chats-search", "nothing")
    assert page.is_visible("text=No chats match.")
    page.fill("#chats-search", "")
    choose(page, "Reverse", "Rename")
    page.keyboard.type("Slices <b>")
    page.keyboard.press("Enter")
    listed(page, "Weather?", "Slices <b>")
    choose(page, "Weather", "Rename")
    page.keyboard.type("Sun")
    page.keyboard.press("Enter")
    listed(page, "Sun", "Slices <b>")
    ask(chat, "Still?", "Yes.")  # the name stays, and so does the chat
    listed(page, "Sun", "Slices <b>")
    name, text = file(page, lambda: choose(page, "Sun", "Export as Markdown"))
    assert name == "Sun.md"
    assert text.startswith("# Sun\n\n## You\n\nWeather?\n\n## model\n\n<details><summary>Reasoning</summary>")
    assert text.endswith("Tool call `time`:\n\n```json\n{}\n```\n\n## You\n\nStill?\n\n## model\n\nYes.\n")
    _, one = file(page, lambda: choose(page, "Slices", "Export as JSON"))
    _, both = file(page, lambda: page.click("#chats-json"))
    [kept] = json.loads(one)["chats"]
    assert json.loads(both)["chats"][1] == kept
    assert kept["exchanges"][0]["question"] == "Reverse a *string*"


def test_a_deletion_is_undone(chat: Chat) -> None:
    page = chat.page
    choose(page, "Weather", "Delete")
    listed(page, "Reverse a *string*")
    assert page.locator(".turn").count() == 0
    page.click("#toast >> text=Undo")
    listed(page, "Weather?", "Reverse a *string*")
    until(page, "document.querySelectorAll('.turn').length == 2")
    chat.ask("And on?")
    page.click("#chats-delete")  # what still comes is not kept again
    until(page, "!document.getElementById('send').hidden")
    page.wait_for_timeout(200)
    listed(page)
    assert page.inner_text("#toast span") == "Deleted 2 chats."
    page.reload()
    ready(page)
    listed(page)
    assert "#chat" not in page.url


def test_an_entry_that_is_broken_harms_no_other(chat: Chat) -> None:
    page = chat.page
    page.evaluate(
        """() => new Promise((resolve) => { indexedDB.open("lmi-chats").onsuccess = ({ target }) => {
            const stores = target.result.transaction(["heads", "bodies"], "readwrite");
            stores.objectStore("heads").put({ id: "b", title: { a: 1 }, updated: "soon" });
            stores.objectStore("bodies").put({ id: "b", title: "<img src=x>", exchanges: [{ question: 1 }] });
            stores.objectStore("heads").put({ id: "c", title: "No body", updated: 1, text: "" });
            stores.oncomplete = () => { target.result.close(); resolve(); };
        }; })"""
    )
    page.reload()
    ready(page)
    listed(page, "Weather?", "Reverse a *string*", "No body", "Unreadable chat")
    for title in ("Unreadable chat", "No body"):
        page.click(f"#chats >> text={title}")
        until(page, "document.getElementById('toast').textContent.startsWith('This chat ')")
        page.click("#toast >> text=✕")
    _, text = file(page, lambda: choose(page, "Unreadable", "Export as JSON"))
    assert json.loads(text)["chats"] == [{"id": "b", "title": "<img src=x>", "exchanges": [{"question": 1}]}]
    choose(page, "Unreadable", "Delete")
    listed(page, "Weather?", "Reverse a *string*", "No body")
    page.click("#chats >> text=Reverse")
    until(page, "document.querySelector('.turn.user .text')?.textContent == 'Reverse a *string*'")


FORBIDDEN = "IDBFactory.prototype.open = () => { throw new DOMException('denied', 'SecurityError'); }"
FULL = """
const { put } = IDBObjectStore.prototype;
IDBObjectStore.prototype.put = function (value) {
    const request = put.call(this, value);
    request.addEventListener("success", () => this.transaction.abort());
    return request;
};
Object.defineProperty(IDBTransaction.prototype, "error", { get: () => new DOMException("", "QuotaExceededError") });
"""


@pytest.mark.parametrize(
    ("script", "shown"),
    [(FORBIDDEN, "This browser cannot save chats: denied"), (FULL, "The browser's storage is full.")],
    ids=["forbidden", "full"],
)
def test_without_room_the_chat_goes_on(echo_server: LiveServer, open_page: Open, script: str, shown: str) -> None:
    page = open_page(echo_server)
    page.add_init_script(script)
    page.reload()
    chat = Chat(page)
    ask(chat, "one", "First.")
    until(page, f"document.getElementById('chats-problem').textContent.startsWith({json.dumps(shown)})")
    ask(chat, "two", "Second.")
    assert [message["content"] for message in chat.bodies[1]["messages"]] == ["one", "First.", "two"]
    name, text = file(page, lambda: page.click("#toast button:text('Export this chat')"))
    assert name == "one.json"
    assert [each["answer"]["content"] for each in json.loads(text)["chats"][0]["exchanges"]] == ["First.", "Second."]


def test_two_tabs_lose_nothing(echo_server: LiveServer, open_page: Open) -> None:
    """A tab follows the chat that it shows. Where both write, both are kept."""
    first = open_page(echo_server)
    one = Chat(first)
    ask(one, "A", "Answer A.")
    listed(first, "A")
    second = first.context.new_page()
    second.goto(first.url)
    two = Chat(second)
    until(second, "document.querySelectorAll('.turn').length == 2")
    ask(two, "B", "Answer B.")
    until(first, "document.querySelectorAll('.turn').length == 4")
    first.evaluate("BroadcastChannel.prototype.postMessage = () => {}")  # the second tab hears of it too late
    one.ask("C")
    two.ask("D")
    one.feed("Answer C.")
    two.feed("Answer D.")
    one.end()
    two.end()
    for page in (first, second):
        until(page, f"document.querySelectorAll('{TITLES}').length == 2")
        assert sorted(titles(page)) == ["A", "A (copy)"]
    _, text = file(first, lambda: first.click("#chats-json"))
    questions = [[each["question"] for each in kept["exchanges"]] for kept in json.loads(text)["chats"]]
    assert sorted(questions) == [["A", "B", "C"], ["A", "B", "D"]]


def test_a_name_is_written_while_an_answer_comes(chat: Chat) -> None:
    """The list is drawn again each time that a chat is kept: not under the reader's hands."""
    page = chat.page
    chat.ask("More?")
    choose(page, "Weather", "Rename")
    page.keyboard.type("S")
    chat.end()
    page.keyboard.type("un")
    page.keyboard.press("Enter")
    listed(page, "Sun", "Reverse a *string*")
    page.click("#chats >> text=Reverse")
    page.click("#chats >> text=Sun")
    until(page, "document.querySelectorAll('.turn').length == 4")
    page.evaluate("location.hash = '#chat-nothing'")
    until(page, "document.getElementById('toast').textContent.includes('no longer exists')")
