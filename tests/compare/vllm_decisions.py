"""Compare decisions with those of vLLM 0.33 or later: the tokens of the prompts, and the probabilities.

Both servers serve the same model, which vLLM has to support (`READ_STRATEGIES` in its openai/decisions/strategies.py):

    vllm serve MODEL_DIR --port 8001 --dtype float32
    lmi serve MODEL_DIR -o option.dtype=fp32 -o option.served_model_name=MODEL_DIR
    python -m tests.compare.vllm_decisions http://127.0.0.1:8001 http://127.0.0.1:8080
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any

import httpx

from proof.bench.report import table

_TEXT = "The parcel arrived broken. I want my money back!"
_NOUL = {"type": "noul", "instructions": "Does the customer want a refund?"}
_CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"Käse": "für 😀", "b": None, "c": "bills"}}
_SCORE = {"type": "score", "instructions": "How angry is the customer?", "criteria": ["calm", "annoyed", "furious"]}
_ALL = {"n": _NOUL, "c": _CHOICE, "s": _SCORE}
_QUESTIONS = [
    {"type": "predicate", "name": "p", "instructions": "The customer wants a refund."},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "a", "description": "b"}, {"value": '"日本"'}]},
    {"type": "choice", "instructions": "Is it?", "choices": [{"value": True}, {"value": "true"}, {"value": False}]},
    {"type": "score", "instructions": "How?", "levels": [{"label": "calm", "description": "c"}, {"label": "angry"}]},
]
_MESSAGES = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_text", "text": "b"}] * 2}]

SYSTEM_ONE: dict[str, dict[str, Any]] = {
    "all types": {"state": _TEXT, "questions": _ALL},
    "criteria": {"state": _TEXT, "questions": {"q": {"type": "noul", "criteria": {"true": "yes it is"}}}},
    "no instructions": {"state": _TEXT, "questions": {"q": {"type": "choice", "criteria": {"a": None, "b": "c"}}}},
    "system message": {"state": _TEXT, "instructions": "Be strict.", "questions": _ALL},
    "JSON": {"state": {"t": ["é", 1.5, None, True]}, "questions": _ALL},
    "empty": {"state": "", "questions": _ALL},
    "spaces": {"state": "\n  a \n\n", "questions": _ALL},
    "letters": {"state": _TEXT, "questions": {"q": {"type": "choice", "criteria": dict.fromkeys(ascii_uppercase)}}},
    "long": {"state": f"{_TEXT} " * 50, "questions": _ALL},
}
OPENAI: dict[str, dict[str, Any]] = {
    "text": {"input": _TEXT, "questions": _QUESTIONS},
    "messages": {"input": _MESSAGES, "questions": _QUESTIONS},
    "no messages": {"input": [], "questions": _QUESTIONS},
}


def probabilities(result: dict[str, Any]) -> list[float]:
    """Return the probabilities in a result of either API."""
    if "probability" in result:
        return [result["probability"]]
    if "noul" in result:
        return [result["noul"]]
    values = result["probabilities"]
    return [*values.values()] if isinstance(values, dict) else [value["probability"] for value in values]


def results(response: dict[str, Any]) -> list[dict[str, Any]]:
    answers = response["answers"]
    return [*answers.values()] if isinstance(answers, dict) else answers


def rows(theirs: httpx.Client, ours: httpx.Client) -> Iterator[list[str]]:
    """Yield for each body: its name, the numbers of tokens at both servers, and the largest difference."""
    model = theirs.get("/v1/models").json()["data"][0]["id"]
    bodies = {("/v1/systemone", name): body for name, body in SYSTEM_ONE.items()}
    bodies |= {("/v1/decisions", name): {**body, "model": model} for name, body in OPENAI.items()}
    for (path, name), body in bodies.items():
        responses = [client.post(path, json=body).raise_for_status().json() for client in (theirs, ours)]
        lists = [[value for one in results(response) for value in probabilities(one)] for response in responses]
        difference = max(abs(first - second) for first, second in zip(*lists, strict=True))
        yield [
            f"{path} {name}",
            *(str(response["usage"]["input_tokens"]) for response in responses),
            f"{difference:.1e}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("theirs", help="the URL of vLLM's server")
    parser.add_argument("ours", help="the URL of this handler")
    arguments = parser.parse_args()
    clients = [httpx.Client(base_url=url, timeout=600) for url in (arguments.theirs, arguments.ours)]
    with clients[0] as theirs, clients[1] as ours:
        print(table(["body", "vLLM's tokens", "tokens", "largest difference"], [*rows(theirs, ours)]))


if __name__ == "__main__":
    main()
