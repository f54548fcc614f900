"""Answer a question from files: embeddings find passages, a reranker sorts them, a chat answers with the best.

    lmi serve                                          # the chat, on port 8080
    lmi serve BAAI/bge-small-en-v1.5 --port 8082       # the embeddings
    python rag.py "How do I stream with boto3?" docs/*.md

EMBEDDINGS_URL, CHAT_URL and RERANK_URL are other servers. LMI_API_KEY is their key. Needs: pip install httpx
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

BATCH = 64  # texts in a request for embeddings
CANDIDATES = 20  # passages for the reranker
MAX_TOKENS = 256  # of the answer
RULE = "Answer with the passages only, in a few sentences. Name their numbers, as [1]. Say so if they lack the answer."


class Passage(NamedTuple):
    file: Path
    text: str


def cut(files: Sequence[Path], size: int = 1200) -> list[Passage]:
    """Cut files at empty lines, into passages of up to `size` characters; a longer paragraph stays whole."""
    passages = []
    for file in files:
        text = ""
        for paragraph in re.split(r"\n\s*\n", file.read_text("utf-8", "replace").strip()):
            if text and len(text) + len(paragraph) > size:
                passages.append(Passage(file, text))
                text = ""
            text = f"{text}\n\n{paragraph}" if text else paragraph
        passages += [Passage(file, text)] if text else []
    return passages


def checked(response: httpx.Response, kind: str = "application/json") -> httpx.Response:
    if not response.is_success or not response.headers.get("content-type", "").startswith(kind):
        response.read()
        raise SystemExit(f"{response.url}: {response.status_code} {response.text}")
    return response


def embed(client: httpx.Client, url: str, texts: Sequence[str]) -> list[list[float]]:
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    bodies = [{"input": batch, "truncate_prompt_tokens": -1} for batch in batches]  # -1: at the model's limit
    answers = [checked(client.post(f"{url}/v1/embeddings", json=body)).json() for body in bodies]
    return [item["embedding"] for answer in answers for item in answer["data"]]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, one, other)) / (math.hypot(*one) * math.hypot(*other))


def rerank(client: httpx.Client, url: str, question: str, passages: Sequence[Passage]) -> list[Passage]:
    body = {"query": question, "documents": [passage.text for passage in passages]}
    found = checked(client.post(f"{url}/v2/rerank", json=body)).json()
    return [passages[result["index"]] for result in found["results"]]


def answer(client: httpx.Client, url: str, question: str, passages: Sequence[Passage]) -> None:
    """Print a chat's answer as it comes."""
    context = "\n\n".join(f"[{number}] {passage.text}" for number, passage in enumerate(passages, 1))
    messages = [{"role": "system", "content": f"{RULE}\n\n{context}"}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        for line in checked(response, "text/event-stream").iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"\nthe answer broke off: {event['error']['message']}")
            print("".join(choice["delta"].get("content") or "" for choice in event["choices"]), end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", help="what to ask")
    parser.add_argument("files", nargs="+", type=Path, help="text or Markdown")
    for name, url in ("embeddings", "http://127.0.0.1:8082"), ("chat", "http://127.0.0.1:8080"), ("rerank", ""):
        default = os.environ.get(f"{name.upper()}_URL", url)
        parser.add_argument(f"--{name}", default=default, metavar="URL", help=f"server (default: {default or 'none'})")
    parser.add_argument("--passages", type=int, default=4, help="for the answer (default: %(default)s)")
    arguments = parser.parse_args()
    passages = cut(arguments.files)
    key = os.environ.get("LMI_API_KEY")
    with httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=300) as client:
        question, *vectors = embed(client, arguments.embeddings, [arguments.question, *(text for _, text in passages)])
        nearest = sorted(zip(vectors, passages, strict=True), key=lambda pair: -cosine(question, pair[0]))
        best = [passage for _, passage in nearest[:CANDIDATES]]
        if arguments.rerank:
            best = rerank(client, arguments.rerank, arguments.question, best)
        del best[arguments.passages :]
        answer(client, arguments.chat, arguments.question, best)
    for number, passage in enumerate(best, 1):
        print(f"[{number}] {passage.file}: {passage.text.splitlines()[0]}")


if __name__ == "__main__":
    try:
        main()
    except (httpx.RequestError, OSError) as error:
        sys.exit(f"{error.request.url}: {error}" if isinstance(error, httpx.RequestError) else str(error))
    except KeyboardInterrupt:
        sys.exit(130)
