"""Send the requests of a file, several at once, and again where the server is busy; go on from where a run stopped.

The files are those of OpenAI's batches, a JSON object a line: {"custom_id", "method", "url", "body"} becomes
{"custom_id", "response": {"status_code", "request_id", "body"}, "error"}. The same command sends what failed again.

    python batch.py requests.jsonl answers.jsonl

LMI_URL is the server (default http://127.0.0.1:8080), LMI_API_KEY its key. Needs: pip install httpx
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx

BUSY = (408, 429, 502, 503, 504)
ATTEMPTS = 8


def parsed(line: bytes, where: str, *names: str) -> list[Any]:
    try:
        return [json.loads(line)[name] for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"{where}: {type(error).__name__}: {error}") from None


def finished(output: BinaryIO) -> tuple[set[str], int]:
    """Return the ids that a file has answers of, and its length without a line that was cut off."""
    ids, end = set(), 0
    for number, line in enumerate(output, 1):
        if line.endswith(b"\n"):
            ids.add(parsed(line, f"{output.name}, line {number}", "custom_id", "response")[0])
            end += len(line)
        elif not line.startswith(b"{"):
            raise SystemExit(f"{output.name}: line {number} is no answer of a batch")
    return ids, end


def requests(path: Path, without: set[str]) -> Iterator[tuple[str, str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            id, url, body = parsed(line, f"{path}, line {number}", "custom_id", "url", "body")
            if not isinstance(id, str) or not str(url).startswith("/"):
                raise SystemExit(f"{path}, line {number}: custom_id is a string, and url a path")
            if id not in without:
                yield id, url, body


async def send(client: httpx.AsyncClient, url: str, body: Any) -> Any:
    """Return the answer's body, or raise httpx.HTTPError after the last attempt."""
    for attempt in range(ATTEMPTS):
        retry_after = ""
        try:
            response = await client.post(url, json=body)
            if response.status_code not in BUSY or attempt + 1 == ATTEMPTS:
                return response.raise_for_status().json()
            retry_after = response.headers.get("retry-after", "")
        except httpx.TransportError:
            if attempt + 1 == ATTEMPTS:
                raise
        least = float(retry_after) if retry_after.isdecimal() else 0.0  # what the server says
        await asyncio.sleep(max(least, random.uniform(0, min(30, 2**attempt))))


async def run(path: Path, output: BinaryIO, concurrency: int) -> int:
    """Send all requests that have no answer yet; return how many failed."""
    done, end = finished(output)
    total = sum(1 for _ in requests(path, done))  # this reads the whole file: no line is wrong
    output.truncate(end)
    left, counts, key = requests(path, done), Counter[str](), os.environ.get("LMI_API_KEY")

    async def work(client: httpx.AsyncClient) -> None:  # all take from the same iterator
        for id, url, body in left:
            try:
                response = {"status_code": 200, "request_id": None, "body": await send(client, url, body)}
                line = {"custom_id": id, "response": response, "error": None}
                output.write(json.dumps(line).encode() + b"\n")
                output.flush()
                counts["answered"] += 1
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # also an answer that is not JSON
                words = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
                print(f"{id}: {error!r} {words}", file=sys.stderr)
                counts["failed"] += 1
            if sys.stderr.isatty():
                print(f"\r{counts.total()}/{total} ", end="", file=sys.stderr, flush=True)

    url, limits = os.environ.get("LMI_URL", "http://127.0.0.1:8080"), httpx.Limits(max_connections=concurrency)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=600) as client:
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
    print(f"{counts['answered']} answered, {counts['failed']} failed, {len(done)} before", file=sys.stderr)
    return counts["failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once (default: %(default)s)")
    arguments = parser.parse_args()
    with arguments.answers.open("a+b") as output:
        output.seek(0)
        return int(asyncio.run(run(arguments.requests, output, arguments.concurrency)) > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, KeyboardInterrupt) as error:  # Ctrl-C has no words
        sys.exit(str(error) or 130)
