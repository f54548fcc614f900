"""More requests at once than three digits count: each gets its own answer, in each mode."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.djl.servers import djl, versions

pytestmark = [pytest.mark.djl, pytest.mark.long]

ECHO = {
    "option.entryPoint": "handler.entry", "option.llm_engine": "echo", "job_queue_size": "2000",
    "option.lmi_version": "0.28",  # whose schema these tests know, in each mode
}  # fmt: skip
SLOW = {"option.max_rolling_batch_size": "1200", "option.echo_tokens_per_second": "1"}  # all are there at once
MODES = {
    "rolling": {"option.rolling_batch": "scheduler", **SLOW},
    "dynamic": {"batch_size": "1200", "max_batch_delay": "4000"},
    "async": {"option.async_mode": "true", "option.rolling_batch": "disable", **SLOW},
}
PLACES = [(version, mode) for mode in MODES for version in versions(since="0.31" if mode == "async" else "0")]
CASES = [(*place, 1001 + 99 * (index % 2)) for index, place in enumerate(PLACES)]  # just above 999, and in its hundreds


async def answer(port: int, index: int) -> tuple[int, str]:
    """Status and body, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"inputs": f"w{index}", "parameters": {"max_new_tokens": 6}}).encode()
    head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next((int(line.partition(":")[2]) for line in headers if line.startswith("content-length")), None)
    data = b""
    if length is not None:
        data = await reader.readexactly(length)
    else:
        while size := int(await reader.readline(), 16):
            data += (await reader.readexactly(size + 2))[:-2]
    writer.close()
    return int(status.split()[1]), data.decode()


async def answers(port: int, number: int) -> list[tuple[int, str]]:
    return list(await asyncio.gather(*(answer(port, index) for index in range(number))))


@pytest.mark.parametrize(("version", "mode", "number"), CASES)
def test_each_of_more_than_999_requests_at_once_gets_its_answer(version: str, mode: str, number: int) -> None:
    with djl(version, {**ECHO, **MODES[mode]}, env={"SERVING_ROLLING_BATCH_BUFFER": "1"}) as server:
        port = int(server.url.rpartition(":")[2])
        found = asyncio.run(answers(port, number))
        assert {status for status, _ in found} == {200}
        said = [json.loads(body) for _, body in found]
        wanted = [{"generated_text": f" w{index}" * 6} for index in range(number)]
        assert said == ([[one] for one in wanted] if mode == "dynamic" else wanted)
