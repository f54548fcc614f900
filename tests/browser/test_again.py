"""What a user does beyond a question and its answer: versions, continuing, queued messages, tokens, shortcuts."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.test_answers import Chat
from tests.browser.test_page import ANSWER, PHONE, until, whole
from tests.servers import LiveServer

pytestmark = pytest.mark.browser

TEXTS = "[...document.querySelectorAll('.turn .text')].map((each) => each.textContent.trim())"


@pytest.fixture
def chat(echo_server: LiveServer, open_page: Open) -> Chat:
    return Chat(open_page(echo_server, permissions=["clipboard-read", "clipboard-write"]))


def answered(chat: Chat, text: str) -> None:
    chat.feed(text)
    chat.end()


def contents(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.bodies[-1]["messages"]]


def texts(page: Any, *wanted: str) -> None:
    until(page, f"JSON.stringify({TEXTS}) == {json.dumps(json.dumps(wanted, separators=(',', ':')))}")


def test_a_bubble_ends_below_its_text_while_an_answer_streams(chat: Chat) -> None:
    page = chat.page
    bottom = """() => {
        const bubble = document.querySelector('.turn.user'), box = bubble.getBoundingClientRect();
        let y = box.bottom;
        while (document.elementFromPoint(box.left + 20, y)?.closest('.turn') !== bubble) y -= 1;
        return [y - bubble.querySelector('.text').getBoundingClientRect().bottom, box.height];
    }"""
    chat.ask("one")
    below, height = page.evaluate(bottom)
    assert 4 < below < 14, "the padding alone"
    answered(chat, "A")
    after, same = page.evaluate(bottom)
    assert (after > 30, same) == (True, height), "the button has its place, and nothing moves"


def test_versions_of_an_answer_keep_what_followed(chat: Chat) -> None:
    page = chat.page
    chat.ask("one")
    answered(chat, "A")
    chat.ask("two")
    answered(chat, "B")
    page.click(".turn.assistant >> nth=0 >> text=Regenerate")
    chat.asked(3)
    answered(chat, "A again")
    texts(page, "one", "A again")
    page.click("[aria-label='Previous version']")
    texts(page, "one", "A", "two", "B")
    assert "1 of 2" in page.inner_text(".versions >> nth=0")
    assert page.get_attribute(":focus", "aria-label") == "Next version"
    page.click(".turn.user >> nth=0 >> text=Edit")
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    chat.asked(4)
    assert contents(chat) == ["one!"]
    answered(chat, "A!")
    page.reload()
    again = Chat(page)
    texts(page, "one!", "A!")
    page.click("[aria-label='Previous version']")
    page.click("[aria-label='Previous version']")
    texts(page, "one", "A", "two", "B")
    again.ask("three")
    assert contents(again) == ["one", "A", "two", "B", "three"]


def test_an_answer_without_anything_is_no_version(chat: Chat) -> None:
    chat.ask("one")
    chat.end(finish=None)
    chat.page.click("button:text('Retry')")
    chat.asked(2)
    answered(chat, "A")
    texts(chat.page, "one", "A")
    assert chat.page.locator(".versions button").count() == 0


def test_an_answer_is_continued_in_the_browser(chat: Chat) -> None:
    page = chat.page
    chat.ask("one")
    chat.feed("Half")
    chat.end(finish="length")
    page.click("text=Continue")
    chat.asked(2)
    assert contents(chat) == ["one", "Half"]
    assert chat.bodies[1]["continue_final_message"] is True
    assert chat.bodies[1]["add_generation_prompt"] is False
    answered(chat, " and *whole*")
    assert whole(page) == "Half and whole"
    assert page.locator(f"{ANSWER} .note").count() == 1
    chat.ask("two")
    assert contents(chat) == ["one", "Half and *whole*", "two"]
    assert "continue_final_message" not in chat.bodies[2]
    assert page.is_hidden(".continue >> nth=0"), "it is not the last answer"


def test_a_message_waits_for_the_answer(chat: Chat) -> None:
    page = chat.page
    chat.ask("one")
    chat.feed("A")
    page.fill("#prompt", "two")
    page.press("#prompt", "Enter")
    assert page.inner_text(".queued .text") == "two"
    assert page.input_value("#prompt") == ""
    assert page.inner_text("#said") == "Queued until the answer ends"
    page.fill("#prompt", "three")
    page.press("#prompt", "Enter")
    assert page.inner_text("#toast span").startswith("A message is already queued.")
    page.click(".queued >> text=Cancel")
    assert page.input_value("#prompt") == "two\n\nthree"
    page.press("#prompt", "Enter")
    page.evaluate('sink.enqueue(\'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\\n\\n\'), sink.close()')
    chat.asked(2)
    assert contents(chat) == ["one", "A", "two\n\nthree"]
    page.fill("#prompt", "four")
    page.press("#prompt", "Enter")
    page.click("#stop")
    until(page, "document.getElementById('prompt').value == 'four'")
    assert page.locator(".queued").count() == 0
    assert len(chat.bodies) == 2


def test_tokens_are_shown_on_demand(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server)
    told = {"id": "model", "parent": None, "supported_parameters": ["top_logprobs"]}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [told]}))
    page.reload()
    chat = Chat(page)
    until(page, "document.querySelector('#p-temperature').parentElement.hidden")
    page.fill("#p-top_logprobs", "2")
    chat.ask("one")
    assert chat.bodies[0]["logprobs"] is True
    assert chat.bodies[0]["top_logprobs"] == 2
    tops = [{"token": " Paris", "logprob": -0.05, "bytes": []}, {"token": "\n", "logprob": -8.0, "bytes": []}]
    tokens = [{**tops[0], "top_logprobs": tops}, {"token": "<b>", "logprob": -3.0, "bytes": [], "top_logprobs": []}]
    choice = {"delta": {"content": " Paris<b>"}, "logprobs": {"content": tokens}, "finish_reason": None}
    page.evaluate("(text) => sink.enqueue(text)", f"data: {json.dumps({'choices': [choice]})}\n\n")
    chat.end()
    for _ in range(2):
        page.click("button:text-is('Tokens')")
        assert page.is_hidden(f"{ANSWER} .text")
        assert page.locator(".token").all_text_contents() == [" Paris", "<b>"]
        levels = page.locator(".token").evaluate_all("(all) => all.map((each) => each.dataset.level)")
        assert levels == ["0", "3"]
        page.focus(".tokens")
        page.keyboard.press("ArrowRight")
        assert page.inner_text(".tokens + p") == "“ Paris” 95.1 %; alternatives: “↵” under 0.1 %"
        page.hover(".token >> nth=1")
        assert page.inner_text(".tokens + p") == "“<b>” 5.0 %"
        page.click("button:text-is('Tokens')")
        assert page.is_visible(f"{ANSWER} .text")
        page.wait_for_timeout(100)  # it is saved
        page.reload()
        page.wait_for_selector(f"{ANSWER} .note")


def test_a_name_of_several_is_chosen(echo_server: LiveServer, open_page: Open) -> None:
    """Served names and adapters; an adapter that is loaded later is there when the window has the focus again."""
    page = open_page(echo_server)
    names = [{"id": "fast", "parent": None}, {"id": "big", "parent": None}, {"id": "model", "parent": None}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": names}))
    page.reload()
    shown = "[...document.querySelectorAll('#model option')].map((option) => option.textContent).join()"
    until(page, f"{shown} == 'fast,big'")
    page.select_option("#model", "big")
    names.append({"id": "sql", "parent": "model"})
    page.evaluate("dispatchEvent(new Event('focus'))")
    until(page, f"{shown} == 'fast,big,sql'")
    assert page.get_attribute("#model optgroup", "label") == "Adapters"
    chat = Chat(page)
    chat.ask()
    assert chat.bodies[0]["model"] == "big"


def test_a_chat_is_copied_as_code(chat: Chat) -> None:
    page = chat.page
    page.fill("#p-system", "Be brief.")
    chat.ask("one")
    answered(chat, "A")
    chat.ask("it's two")
    answered(chat, "B")
    wanted = ["Be brief.", "one", "A", "it's two"]

    def copied(action: str) -> str:
        page.click("#chats li .more")
        page.click(f"#chat-menu >> text={action}")
        page.click("#toast:has-text('Copied the request') >> text=✕")
        return str(page.evaluate("navigator.clipboard.readText()"))

    body = json.loads(shlex.split(copied("Copy as curl"))[-1])
    assert [message["content"] for message in body["messages"]] == wanted
    page.click("#clear")  # of a chat that is not shown, too
    page.fill("#p-system", "Another.")
    call = next(
        node
        for node in ast.walk(ast.parse(copied("Copy as Python")))
        if isinstance(node, ast.Call) and len(node.keywords) > 3
    )
    values = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert [message["content"] for message in values["messages"]] == wanted


def test_shortcuts_and_their_list(chat: Chat) -> None:
    page = chat.page
    chat.ask("one")
    answered(chat, "A")
    page.focus("#prompt")
    page.keyboard.type("?")
    assert page.input_value("#prompt") == "?"
    assert not page.is_visible("#keys")
    page.keyboard.press("Backspace")
    page.keyboard.press("ArrowUp")
    assert page.input_value(":focus") == "one"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.is_visible("#keys")
    assert page.locator("#keys dt").count() == 9
    page.keyboard.press("Control+k")  # the dialog comes first
    page.keyboard.press("Escape")
    assert not page.is_visible("#keys")
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "chats-search"
    page.keyboard.press("Control+b")
    assert page.is_hidden("#history")
    page.keyboard.press("Control+Shift+O")
    assert page.locator(".turn").count() == 0
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_the_field_grows_and_no_name_breaks(echo_server: LiveServer, open_page: Open) -> None:
    page = Chat(open_page(echo_server, **PHONE)).page
    height = "document.getElementById('prompt').offsetHeight"
    before = page.evaluate(height)
    page.fill("#prompt", "\n".join("abcdefgh"))
    assert page.evaluate(height) > 2 * before
    page.fill("#prompt", "\n" * 200)
    assert page.evaluate(f"{height} < innerHeight / 2")
    broken = """[...document.querySelectorAll('#parameters .name label')].filter((label) => {
        const { right } = label.getBoundingClientRect();
        return label.getClientRects().length > 1 || right > label.parentNode.getBoundingClientRect().right - 20;
    }).map((label) => label.textContent)"""
    page.click("#settings-toggle")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        if page.is_hidden("#settings"):
            page.click("#settings-toggle")
        assert page.evaluate(broken) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
