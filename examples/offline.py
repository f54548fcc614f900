"""Generate text in this process, without a server: an answer to each line of stdin."""

import asyncio
import json
import sys

from handler.config.loader import read_server_config
from handler.core.loop import run_in_daemon_thread
from handler.serving.start import ServedModel, running


async def generate(model: ServedModel, prompts: list[str], **parameters: object) -> list[str]:
    async def one(prompt: str) -> str:
        over = asyncio.Event()
        with model.open({}, on_bytes=lambda task: task.finished and over.set()) as task:
            task.begin(task.run(json.dumps({"inputs": prompt, "parameters": parameters}).encode()))
            await over.wait()
            return json.loads(task.take())["error" if task.error else "generated_text"]

    return await asyncio.gather(*map(one, prompts))


async def main(*options: str) -> None:
    async with running(read_server_config(overrides=options).checked()) as model:
        while line := await run_in_daemon_thread(sys.stdin.readline):
            print(*await generate(model, [line.strip()]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
