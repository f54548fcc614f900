"""llama_index's OpenAILike, by its three lines in docs/client.md."""

from __future__ import annotations

import pytest

from tests.clients.checks import PARIS
from tests.clients.documents import SAYS, example
from tests.clients.driver import Driver, drivers, python_client
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

llama_index = drivers("llama-index", "drive_llama_index")


@pytest.mark.parametrize(
    ("prompt", "chat", "wanted"),
    [("What is the capital of France?", True, "The capital of France is Paris."), (PARIS, False, " Paris.")],
    ids=["chat", "completion"],
)
def test_a_stream_says_what_the_whole_answer_says(
    llama_index: Driver, openai_server: LiveServer, prompt: str, chat: bool, wanted: str
) -> None:
    options = {"chat": chat, "max_tokens": 12, "temperature": 0}
    text = llama_index.generate(openai_server.url, prompt, **options)
    assert text.startswith(wanted)
    pieces = llama_index.stream(openai_server.url, prompt, **options)
    assert "".join(pieces) == text
    assert len(pieces) > 4


def test_a_refusal_is_the_servers_own(llama_index: Driver, openai_server: LiveServer) -> None:
    for how in ("generate", "stream"):
        outcome = llama_index.call(how, openai_server.url, PARIS, chat=True, max_tokens=100_000)
        assert outcome.error == "openai.BadRequestError"
        assert "max_tokens" in outcome.message


def test_the_documents_lines(openai_server: LiveServer) -> None:
    assert python_client("llama-index", "drive_llama_index").run(example("LlamaIndex", openai_server.url)) == SAYS
