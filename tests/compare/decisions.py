"""Measure decisions on a CPU: questions per second about one state, beside the same questions as chats.

A chat's output is limited to the names of the options (`structured_outputs`), so both give a choice. The demo model
answers both; they take turns. Run nothing else on the machine:

    python -m tests.compare.decisions [--questions 1,3,30] [--tokens 500] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

from proof.bench.cli import counts
from proof.bench.machine import describe
from proof.bench.processes import lmi_serve
from proof.bench.report import table

_WORDS = ("river", "stone", "market", "window", "letter", "garden", "engine", "winter")
_OPTIONS = ("yes", "no")


def state(num_tokens: int, number: int) -> str:
    """A text of about `num_tokens` tokens, which differs from the texts of other numbers from its first word on."""
    return f"Report {number}:" + "".join(f" {_WORDS[(at * 7 + number) % len(_WORDS)]}" for at in range(num_tokens - 4))


def question(index: int) -> str:
    return f"Does the report mention item {index} of the list?"


def decide(client: httpx.Client, text: str, num_questions: int) -> None:
    questions = {f"q{index}": {"type": "noul", "instructions": question(index)} for index in range(num_questions)}
    response = client.post("/v1/systemone", json={"state": text, "questions": questions})
    assert response.status_code == 200, response.text
    assert len(response.json()["answers"]) == num_questions


def chat(client: httpx.Client, text: str, num_questions: int) -> None:
    for index in range(num_questions):
        content = f"{text}\n\n{question(index)}\nAnswer with only yes or no."
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
            "temperature": 0,
            "structured_outputs": {"choice": list(_OPTIONS)},
        }
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] in _OPTIONS


def seconds(
    ask: Callable[[httpx.Client, str, int], None], client: httpx.Client, text: str, num_questions: int
) -> float:
    began = time.perf_counter()
    ask(client, text, num_questions)
    return time.perf_counter() - began


def measure(client: httpx.Client, num_questions: int, num_tokens: int, repeat: int) -> dict[str, Any]:
    """Return the median seconds of decisions and of chats, which take turns about states of their own."""
    times: dict[str, list[float]] = {"decisions": [], "chats": []}
    for number in range(repeat):
        for name, ask in (("decisions", decide), ("chats", chat)):
            text = state(num_tokens, 1 + number + 1000 * num_questions + (500 if ask is chat else 0))
            times[name].append(seconds(ask, client, text, num_questions))
    decisions, chats = (statistics.median(times[name]) for name in ("decisions", "chats"))
    return {
        "questions": num_questions,
        "decisions/s": round(num_questions / decisions, 2),
        "chats/s": round(num_questions / chats, 2),
        "ratio": round(chats / decisions, 2),
        "seconds": round(decisions, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=counts, default=[1, 3, 30], help="numbers of questions (default: 1,3,30)")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of the state (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions; the table shows medians")
    arguments = parser.parse_args()
    with lmi_serve([]) as server, httpx.Client(base_url=server.url, timeout=600) as client:
        for ask in (decide, chat):
            ask(client, "a short text", 1)  # loads what is loaded at the first request
        rows = [measure(client, number, arguments.tokens, arguments.repeat) for number in arguments.questions]
    print(table([*rows[0]], [[str(value) for value in row.values()] for row in rows]))
    print(json.dumps({"rows": rows, **describe()}))


if __name__ == "__main__":
    main()
