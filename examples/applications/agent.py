"""Let a model call tools until it has the answer: it reads files of one directory, and calculates.

    lmi serve Qwen/Qwen3-8B                            # or any model that calls tools
    python agent.py "How many options has docs/options.md? Multiply by 12." --directory .

LMI_URL is another server, LMI_API_KEY its key. Needs: pip install httpx
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

LONGEST_FILE = 20_000  # characters; the rest is cut off
LONGEST_EXPRESSION = 200  # characters
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def read_file(directory: Path, path: str) -> str:
    file = (directory / path).resolve()
    if not file.is_relative_to(directory.resolve()):
        raise ValueError(f"{path} is outside of the directory")
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(LONGEST_FILE)


def calculate(directory: Path, expression: str) -> str:
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"an expression has at most {LONGEST_EXPRESSION} characters")
    return str(value(ast.parse(expression.strip(), mode="eval").body))


def value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
    raise ValueError("an expression has numbers, + - * / and parentheses")


def function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Describe a tool whose parameters are strings."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: Mapping[str, Callable[..., str]] = {"read_file": read_file, "calculate": calculate}
DESCRIPTIONS = [
    function("read_file", "Read a text file.", path="relative to the directory, as docs/options.md"),
    function("calculate", "Calculate with numbers.", expression="as (3 + 4) * 12 / 5"),
]


def call(directory: Path, name: str, arguments: str) -> str:
    """Return a tool's result. Its error is a result too, so that the model can mend the call."""
    try:
        if name not in TOOLS:
            raise ValueError(f"there is no tool {name}; there are {', '.join(TOOLS)}")
        return TOOLS[name](directory, **json.loads(arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run(client: httpx.Client, question: str, directory: Path, rounds: int, max_tokens: int) -> str:
    """Return the answer; raise SystemExit where there is none after so many rounds."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(rounds):
        body = {"messages": messages, "tools": DESCRIPTIONS, "max_tokens": max_tokens, "temperature": 0}
        response = client.post("/v1/chat/completions", json=body)
        try:
            message = response.raise_for_status().json()["choices"][0]["message"]
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):  # or no chat's answer
            raise SystemExit(f"{response.url}: {response.status_code} {response.text}") from None
        if not message.get("tool_calls"):
            return message["content"] or ""
        messages.append(message)
        for tool in message["tool_calls"]:
            name, arguments = tool["function"]["name"], tool["function"]["arguments"]
            result = call(directory, name, arguments)
            print(f"{name} {arguments}: {result[:80]!r}", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": tool["id"], "content": result})
    raise SystemExit(f"no answer after {rounds} rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", help="what to ask")
    parser.add_argument("--directory", type=Path, default=Path(), help="whose files may be read (default: this one)")
    parser.add_argument("--rounds", type=int, default=8, help="answers with calls, at most (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each answer (default: %(default)s)")
    arguments = parser.parse_args()
    url, key = os.environ.get("LMI_URL", "http://127.0.0.1:8080"), os.environ.get("LMI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=300) as client:
        print(run(client, arguments.question, arguments.directory, arguments.rounds, arguments.max_tokens))


if __name__ == "__main__":
    try:
        main()
    except httpx.RequestError as error:
        sys.exit(f"{error.request.url}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
