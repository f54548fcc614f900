"""Small handlers in DJL's own terms, each the text of a model.py, for the tests of DJL itself."""

# One word of the prompt a step. The body: inputs; wait, seconds before each step of it; error, the end after the words.
ROLLING = """
import time

from djl_python import Output

live = []


def handle(inputs):
    if inputs.is_empty():
        return None
    for item in inputs.get_batches()[len(live):]:
        body = item.get_as_json()
        live.append(body | {"words": [word + " " for word in body["inputs"].split()], "new": True})
    time.sleep(max(body.get("wait", 0) for body in live))
    output = Output()
    for place, body in enumerate(live):
        reply = {"data": body["words"].pop(0) if body["words"] else ""}
        reply["last"] = not body["words"]
        if reply["last"] and "error" in body:
            reply |= {"code": 424, "error": body["error"]}
        if body.pop("new", False):
            output.add_property(f"batch_{place}_Content-Type", "text/x-words")
        output.add(Output.binary_encode(reply), key="data", batch_index=place)
    live[:] = [body for body in live if body["words"]]
    return output
"""

# How many requests came together, and the words of each.
DYNAMIC = """
from djl_python import Output


def handle(inputs):
    if inputs.is_empty():
        return None
    output, batch = Output(), inputs.get_batches()
    for index, item in enumerate(batch):
        if item.get_as_json()["inputs"] == "bad":
            raise ValueError("a bad one")
        output.add(f"{len(batch)} {item.get_as_json()['inputs']}", key="data", batch_index=index)
    return output
"""

# One word of the prompt at a time, as a server-sent event.
ASYNC = """
import asyncio

from djl_python import Output


async def handle(inputs):
    return Output() if inputs.is_empty() else stream(inputs.get_as_json())


met = 0


async def stream(body):
    global met
    words, meet = body["inputs"].split(), body.get("meet", 0)
    met += bool(meet)
    while met < meet:
        await asyncio.sleep(0.01)
    for index, word in enumerate(words):
        await asyncio.sleep(body.get("wait", 0))
        output = Output()
        output.add_property("Content-Type", "text/event-stream")
        output.add(Output.binary_encode({"data": f"data: {word}\\n\\n", "last": index == len(words) - 1}))
        yield output
"""

# What a request looks like from inside, in plain mode.
MIRROR = """
from djl_python import Output


def handle(inputs):
    if inputs.is_empty():
        return None
    content = inputs.get_content()
    contents = {content.key_at(i): bytes(content.value_at(i)).decode() for i in range(content.size())}
    output = Output(201, "As You Like It")
    output.add_property("X-Mirror", "yes")
    return output.add_as_json({"properties": inputs.get_properties(), "contents": contents})
"""

FAILS_TO_LOAD = """
def handle(inputs):
    raise RuntimeError("there are no weights here")
"""

FAILS_TO_IMPORT = "import a_package_that_nobody_has"

# Leaves a process behind, as a handler with an engine process of its own must not.
LITTERS = """
import subprocess

subprocess.Popen(["sleep", "1000"])


def handle(inputs):
    return None
"""
