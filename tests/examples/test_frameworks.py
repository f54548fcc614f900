"""The examples with frameworks, each in an environment with it: LangGraph, Strands, Gradio."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.server import serve
from tests.clients import toolchains
from tests.clients.agents.scripted import Model, call, said_by, scripted
from tests.environment import clean_environment
from tests.examples.programs import APPLICATIONS, run
from tests.servers import PATIENCE, free_port, options

pytestmark = pytest.mark.clients

LANGGRAPH, STRANDS, GRADIO = (
    APPLICATIONS / f"{name}.py" for name in ("langgraph_agent", "strands_agent", "gradio_chat")
)
FRAMEWORKS = (LANGGRAPH, STRANDS, GRADIO)
_ASKED = "What are 12 boxes of 24 bottles?"
_ASK_GRADIO = """
import json, sys, time
from gradio_client import Client
end = time.monotonic() + float(sys.argv[2])
while True:
    try:
        page = Client(sys.argv[1], verbose=False)
        break
    except Exception:
        if time.monotonic() > end:
            raise
        time.sleep(0.2)
answers = []
for text in sys.argv[3:]:
    job = page.submit(text, api_name="/answer")
    answers.append([job.result(), len(job.outputs())])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with scripted(tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.mark.parametrize(
    ("program", "environment", "before"),
    [(LANGGRAPH, "langgraph", ["calls {'a': 12, 'b': 24}", "288.0"]), (STRANDS, "strands", [])],
    ids=["langgraph", "strands"],
)
def test_an_agent_calls_its_tool(model: Model, program: Path, environment: str, before: list[str]) -> None:
    def answer(prompt: str) -> str:
        found = said_by("tool", prompt)
        return f"It is {float(found[0]):g}." if found else call("multiply", a=12, b=24)

    model.says(answer)
    output = run(program, _ASKED, python=str(toolchains.python(environment)), LMI_URL=model.url)
    assert output.split("\n") == [*before, "It is 288.", ""]
    assert "Multiply two numbers." in model.prompts[0], "the model is told of its tool"
    assert said_by("user", model.prompts[-1])[-1] == _ASKED


@pytest.mark.nightly
def test_a_page_streams_answers_and_sends_the_conversation() -> None:
    python, port = str(toolchains.python("gradio")), free_port()
    quiet = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
    with serve("--engine", "echo", *options("option.echo_tokens_per_second=50")) as server:
        environment = {**clean_environment(), **quiet, "LMI_URL": server.url, "PORT": str(port)}
        page = subprocess.Popen([python, str(GRADIO)], env=environment, stdout=subprocess.DEVNULL)
        try:
            ask = [python, "-c", _ASK_GRADIO, f"http://127.0.0.1:{port}", str(2 * PATIENCE), "a b c", "d"]
            done = subprocess.run(ask, env=environment, capture_output=True, text=True, timeout=2.5 * PATIENCE)
        finally:
            page.terminate()
            page.wait()
    assert done.returncode == 0, done.stderr
    (first, num_steps), (second, _) = json.loads(done.stdout.splitlines()[-1])
    assert first.startswith(" user: a b c")
    assert num_steps > 10
    assert second.startswith(" user: a b c assistant: user: a b c"), "the model gets the conversation"
