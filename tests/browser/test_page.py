"""The chat page in a real browser: what a user does and sees."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from handler.http.routes import ASSETS
from tests.browser.conftest import Open, needed
from tests.servers import LiveServer, serve, wait_for

pytestmark = pytest.mark.browser

ROUTE = re.search(r'CHAT_ROUTE = "(.+)"', ASSETS["/page/client.js"].read_text())[1]  # type: ignore[index]
CANCELLED = 'lmi_requests_total{outcome="cancelled"}'
ANSWER = ".turn.assistant:last-child"
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def ready(page: Any) -> None:
    page.wait_for_selector("#state[data-state=ready]")


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def until(page: Any, condition: str) -> None:
    """wait_for_function would need eval, which the page's policy forbids to all."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"not within 30 s: {condition}")


def unfold(page: Any, panel: str) -> None:
    """Show the right side, and a panel of it."""
    if page.is_hidden("#settings"):
        page.click("#settings-toggle")
    title = f"h2:text-is('{panel}')"
    if page.get_attribute(f"#settings details:has({title})", "open") is None:
        page.click(f"#settings {title}")


def whole(page: Any) -> str:
    """The last answer, when it is complete."""
    page.wait_for_selector(f"{ANSWER} .note")
    return str(page.inner_text(f"{ANSWER} .text"))


def record(page: Any) -> None:
    """Keep the texts that the answer has in turn, as `seen`."""
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
            const text = document.querySelector('.turn.assistant .text')?.textContent.trimEnd();
            if (text && text !== seen.at(-1)) seen.push(text);
        }).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true}) }"""
    )


@pytest.mark.model
@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desktop", "phone"])
def test_a_chat_with_the_demo_model(model_server: LiveServer, open_page: Open, settings: dict[str, Any]) -> None:
    model_server.wait_ready()
    page = open_page(model_server, **settings)
    ready(page)
    if settings:
        unfold(page, "Parameters")
    page.fill("#p-temperature", "0")
    page.fill("#p-max_tokens", "24")
    record(page)
    send(page, "What is the capital of France?")
    whole(page)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(page.evaluate("seen")))
    assert page.inner_text("#model-name").startswith("SmolLM2-135M-Instruct")
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 24,
    }
    alone = model_server.post(body, f"/{ROUTE}").json()["choices"][0]["message"]["content"]
    assert whole(page) == alone.strip()
    assert re.fullmatch(r"\d+ tokens · first after .* tokens/s( · .*)?", page.inner_text(f"{ANSWER} .note"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_answer_grows_while_it_comes(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    page.fill("#p-max_tokens", "20")
    record(page)
    send(page, "one two three")
    whole(page)
    seen = page.evaluate("seen")
    assert len(seen) >= 3, "20 tokens took two seconds"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))


def test_the_conversation_goes_along_until_a_new_chat(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    page.fill("#p-max_tokens", "2")
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    send(page, "one")
    first = whole(page)
    page.fill("#p-system", "Be brief.")
    send(page, "two")
    until(page, "document.querySelectorAll('.note').length == 2")
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    send(page, "three")
    whole(page)
    page.fill("#p-max_tokens", "2000")
    send(page, "and on")
    until(page, "document.querySelectorAll('.turn.assistant .text')[1]?.textContent")
    page.click("#clear")  # while an answer comes
    page.fill("#p-max_tokens", "2")
    until(page, "!document.querySelector('#send').hidden")
    send(page, "four")
    whole(page)
    one, two, three, _, four = bodies
    assert one == {
        "model": "mine",
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "stream": True,
    }
    assert [message["content"] for message in two["messages"]] == ["Be brief.", "one", f" {first}", "two"]
    assert [message["role"] for message in two["messages"]] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in three["messages"]] == ["Be brief.", "three"]
    assert [message["content"] for message in four["messages"]] == ["Be brief.", "four"]


def test_stopping_frees_the_engine(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    before = slow_server.metric(CANCELLED)
    stops: list[Callable[[], None]] = [lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")]
    for stop in stops:
        send(page, "a b c")
        until(page, "document.querySelector('.turn.assistant:last-child .text').textContent.length > 6")
        assert page.get_attribute("#log", "aria-busy") == "true"
        stop()
        whole(page)
        assert page.inner_text(f"{ANSWER} .note").startswith("stopped")
        assert page.evaluate("document.activeElement.id") == "prompt"
        assert page.get_attribute("#log", "aria-busy") == "false"
    wait_for(lambda: slow_server.metric(CANCELLED) == before + 2, 5, "not cancelled")
    wait_for(lambda: slow_server.metric("lmi_active_sequences") == 0, 5, "the engine still works")


def test_an_answer_in_one_piece(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    page.uncheck("#p-stream")
    page.fill("#p-max_tokens", "3")
    send(page, "a b")
    assert whole(page) == "user: a b"
    assert page.inner_text(f"{ANSWER} .note").endswith("cut at max_tokens")


def test_a_chat_in_events(events_server: LiveServer, open_page: Open) -> None:
    """With `[DONE]`, where other releases of LMI have JSON lines."""
    page = open_page(events_server)
    ready(page)
    page.fill("#p-max_tokens", "3")
    send(page, "a ö")
    assert whole(page) == "user: a ö"


def test_live_metrics(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    assert page.inner_text("#state-text") == "Ready"
    assert page.inner_text("#model-name") == "mine"
    assert page.title() == "mine · lmi-handler"
    page.fill("#p-max_tokens", "40")
    send(page, "a b")
    until(page, "document.getElementById('m-active').textContent == '1'")
    until(page, "/^(8|9|1[0-2])(\\.\\d)? .s$/.test(document.getElementById('m-speed').textContent)")
    page.click("#stop")
    until(page, "document.getElementById('m-active').textContent == '0'")


def test_large_counts_have_separators(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server)
    ready(page)
    counts = {"lmi_generated_tokens_total": 65772, 'lmi_requests_total{outcome="ok"}': 1408}
    shown = page.evaluate(
        "async (found) => (await import('/page/metrics.js')).figures(new Map(Object.entries(found)))", counts
    )
    assert [shown["m-tokens"], shown["m-ok"]] == ["65,772", "1,408"]


# -- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_refusal_is_shown_and_retried(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    page.fill("#p-max_tokens", "99999999")
    send(page, "hello")
    page.wait_for_selector(f"{ANSWER}.broken .error")
    assert re.match(r"The server refused \(4\d\d\): max_tokens=99999999: with ", page.inner_text(".error"))
    assert "not part of the chat" in page.inner_text(".error")
    assert ["status of 4" in text for text in page.problems] == [True]  # the browser's own note
    page.problems.clear()
    page.fill("#p-max_tokens", "-1")  # the browser itself says what is wrong
    page.click("button:text('Retry')")
    assert page.evaluate("document.activeElement.id") == "p-max_tokens"
    page.fill("#p-max_tokens", "2")
    page.click("button:text('Retry')")
    page.wait_for_selector(".broken", state="detached")
    assert whole(page) == "user: hello"
    assert page.locator(".turn").count() == 2


@pytest.mark.parametrize(
    ("status", "body", "shown"),
    [(502, f"<html>{'x' * 200_000}</html>", f"<html>{'x' * 994} …"), (400, '{"error":{}}', '{"error":{}}')],
    ids=["a proxy's page", "no message"],
)
def test_a_refusal_of_any_form_is_short(
    slow_server: LiveServer, open_page: Open, status: int, body: str, shown: str
) -> None:
    page = open_page(slow_server)
    ready(page)
    page.route(f"**/{ROUTE}", lambda route: route.fulfill(status=status, body=body))
    send(page, "hello")
    page.wait_for_selector(f"{ANSWER}.broken .error")
    assert page.inner_text(".error").splitlines()[0] == f"The server refused ({status}): {shown}"
    assert [f"status of {status}" in text for text in page.problems] == [True]  # the browser's own note
    page.problems.clear()


def test_a_failure_in_the_stream_keeps_what_came(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    send(page, "x y <raise>")
    page.wait_for_selector(f"{ANSWER}.broken .error")
    assert "raised on cue" in page.inner_text(".error")
    assert whole(page) == "user: x y"
    page.wait_for_selector(f"{ANSWER} button:text('Retry')")


def test_a_server_that_goes_away(open_page: Open) -> None:
    with serve("--engine", "echo") as server:
        page = open_page(server)
        ready(page)
    page.wait_for_selector("#state[data-state=down]")
    send(page, "hello")
    page.wait_for_selector(".error")
    assert page.inner_text(".error").startswith("The server cannot be reached. Is it still running?")
    page.wait_for_timeout(100)
    assert all("ERR_" in text for text in page.problems)
    page.problems.clear()


# -- the key -----------------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_and_kept_in_the_tab_only(locked_server: LiveServer, open_page: Open) -> None:
    page = open_page(locked_server)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-input", "wrong")
    page.press("#key-input", "Enter")
    page.wait_for_selector("#key-dialog[open] >> text=rejected this key")
    page.fill("#key-input", "second")
    page.click("#key-dialog .main")
    ready(page)
    page.fill("#p-max_tokens", "2")
    send(page, "a b")
    assert whole(page) == "user: a"
    assert page.evaluate("JSON.stringify([Object.values(sessionStorage), {...localStorage}, document.cookie])") == (
        '[["second"],{},""]'
    )
    assert "${LMI_API_KEY%%,*}" in page.text_content("#code")
    assert "second" not in page.content()
    page.reload()
    ready(page)
    page.click("#key-button")
    page.click("#key-forget")
    page.wait_for_selector("text=Locked: an API key is needed")
    assert page.evaluate("sessionStorage.length") == 0
    page.wait_for_timeout(1500)  # it does not ask again and again
    assert ["401" in text for text in page.problems] == [True, True]  # without a key, and with the wrong one
    page.problems.clear()


# -- the request as code -----------------------------------------------------------------------------------------


def code(page: Any, tab: str) -> str:
    unfold(page, "The request as code")
    page.click(f"#tab-{tab}")
    return str(page.inner_text("#code"))


def test_the_code_follows_the_parameters(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    page.fill("#prompt", 'It\'s "here"\nand there $HOME')
    page.fill("#p-seed", "7")
    page.fill("#p-stop", "END")
    page.fill("#p-temperature", "")
    page.fill("#p-top_p", "")
    wanted = {
        "model": "mine",
        "messages": [{"role": "user", "content": 'It\'s "here"\nand there $HOME'}],
        "seed": 7,
        "stop": "END",
        "stream": True,
    }
    curl = shlex.split(code(page, "curl"))
    assert curl[:3] == ["curl", "-Ns", f"{slow_server.url}/{ROUTE}"]
    assert json.loads(curl[-1]) == wanted
    boto3 = code(page, "boto3")
    body = next(node for node in ast.parse(boto3).body if isinstance(node, ast.Assign))
    assert ast.literal_eval(body.value) == wanted
    assert "invoke_endpoint_with_response_stream" in boto3
    openai = code(page, "openai")
    call = next(node for node in ast.walk(ast.parse(openai)) if isinstance(node, ast.Call) and len(node.keywords) > 3)
    assert {word.arg: ast.literal_eval(word.value) for word in call.keywords} == wanted
    assert f'base_url="{slow_server.url}/v1"' in openai
    page.uncheck("#p-stream")
    assert "stream" not in code(page, "openai")
    assert "client.invoke_endpoint(" in code(page, "boto3")
    page.press("#tab-boto3", "ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-curl"
    assert page.get_attribute("#tab-curl", "aria-selected") == "true"


# -- access ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "settings", "scheme"),
    [
        pytest.param("/", {}, "light", id="chat-desktop-light"),
        pytest.param("/", {}, "dark", id="chat-desktop-dark"),
        pytest.param("/", PHONE, "light", id="chat-phone-light", marks=pytest.mark.nightly),
        pytest.param("/", PHONE, "dark", id="chat-phone-dark"),
        pytest.param("/docs", {}, "light", id="docs-desktop-light", marks=pytest.mark.nightly),
        pytest.param("/docs", PHONE, "dark", id="docs-phone-dark", marks=pytest.mark.nightly),
    ],
)
def test_axe_finds_nothing(
    slow_server: LiveServer, open_page: Open, path: str, settings: dict[str, Any], scheme: str
) -> None:
    """Deque's rules: labels, roles, contrast, focus order."""
    axe = needed("axe_playwright_python.sync_playwright")
    page = open_page(slow_server, path, color_scheme=scheme, **settings)
    if path == "/":
        ready(page)
        for panel in ("Parameters", "The request as code", "Server"):
            unfold(page, panel)
        page.fill("#p-max_tokens", "2")
        send(page, "a b")
        whole(page)
    else:
        page.click("#post_invocations > summary")
        for summary in page.query_selector_all("#post_invocations details > summary"):
            summary.click()
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_keyboard_alone(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    page.keyboard.press("Tab")
    assert page.inner_text(":focus") == "Skip to the message"
    page.keyboard.press("Enter")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.input_value("#prompt") == "a\nb"
    page.fill("#p-max_tokens", "2")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    assert whole(page) == "user: a"
