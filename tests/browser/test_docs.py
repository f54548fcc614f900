"""The API page in a real browser: it shows what the server's document says, and tries a route."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Open
from tests.servers import LiveServer, http

pytestmark = pytest.mark.browser


def test_every_operation_is_there_and_opens(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server, "/docs")
    page.wait_for_selector("details.operation")
    api = http.get(echo_server.url + "/api-doc/openapi.json").json()
    wanted = {
        item[method]["operationId"] for item in api["paths"].values() for method in item if method != "parameters"
    }
    panels = page.query_selector_all("details.operation")
    assert {panel.get_attribute("id") for panel in panels} == wanted
    for panel in panels:
        panel.query_selector("summary").click()
        panel.wait_for_selector("form button")
    assert page.locator("form [type=file]").count() == 1, "an upload has its file"
    row = page.locator("#post_invocations tr", has=page.locator("th", has_text="top_p")).first
    assert "number | null ≥ 0, ≤ 1" in row.text_content()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_search_leaves_the_routes_that_have_all_its_words(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server, "/docs")
    page.wait_for_selector("details.operation")

    def found(words: str) -> set[str]:
        page.fill("#query", words)
        shown = {panel.get_attribute("id") for panel in page.query_selector_all("details.operation:visible")}
        assert page.inner_text("#count") == (f"{len(shown)} route{'s' * (len(shown) != 1)}" if words else "")
        return shown

    everything = found("")
    assert found("/v1/messages") == {id for id in everything if "_v1_messages" in id}
    assert found("/v1/messages/batches cancel") == {"post_v1_messages_batches_batch_cancel"}
    assert [title.inner_text() for title in page.query_selector_all("h2:visible")] == ["Anthropic"]
    assert found("/v1/responses cancel") == {"post_v1_responses_response_cancel"}
    assert "get_v1_responses_response" in found("starting_after"), "a parameter of the query"
    assert found("/v1/conversations delete") == {
        "delete_v1_conversations_conversation", "delete_v1_conversations_conversation_items_item"
    }  # fmt: skip
    assert found("tokens count anthropic") == {"post_v1_messages_count_tokens"}
    assert "post_v1_chat_completions" in found("parallel_tool_calls"), "a field of the body"
    assert found("nothing has this") == set()
    assert found("") == everything
    groups = page.query_selector_all("#groups a")
    assert [group.inner_text() for group in groups] == [title.inner_text() for title in page.query_selector_all("h2")]
    groups[-1].click()
    assert page.evaluate("document.getElementById(location.hash.slice(1)).getBoundingClientRect().top") < 700


def test_a_route_is_tried(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server, "/docs")
    page.click("#post_invocations > summary")
    page.fill("#post_invocations-body", '{"inputs": "a b", "stream": true, "parameters": {"max_new_tokens": 2}}')
    page.click("#post_invocations form button")
    page.wait_for_selector("#post_invocations pre[aria-live] >> text=generated_text")
    shown = page.inner_text("#post_invocations pre[aria-live]")
    assert shown.startswith("200 application/jsonlines\n\n{")
    assert shown.rstrip().endswith('"generated_text":" a b"}')
    page.fill("#post_invocations-body", '{"inputs": 1}')
    page.click("#post_invocations form button")
    page.wait_for_selector("#post_invocations pre[aria-live] >> text=must be a non-empty string")
    page.problems.clear()  # the browser's own note of the 424
    page.click("#get_models_model > summary")
    page.fill("#get_models_model-model", "model")
    page.click("#get_models_model form button")
    page.wait_for_selector("#get_models_model pre[aria-live] >> text=requestInQueue")


def test_a_locked_document_asks_for_the_key(locked_server: LiveServer, open_page: Open) -> None:
    page = open_page(locked_server, "/docs")
    page.fill("#key-input", "first")
    page.click("#key-form button")
    page.wait_for_selector("details.operation")
    assert page.is_hidden("#key-form")
    assert all("401" in text for text in page.problems)
    page.problems.clear()
