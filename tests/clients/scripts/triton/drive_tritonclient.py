"""Asks with tritonclient, which knows no generate: about a server and its model, and by infer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy
import tritonclient.http
import tritonclient.http.aio
from common import main

_STATES = ("is_server_live", "is_server_ready", "get_server_metadata", "get_model_repository_index")
_OF_MODEL = ("is_model_ready", "get_model_metadata", "get_model_config")


_TYPES = {"BYTES": object, "INT32": numpy.int32, "BOOL": bool, "FP32": numpy.float32, "UINT64": numpy.uint64}


def _request(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of infer. `options` has the inputs, each a datatype and its values, and what else infer takes."""
    inputs = []
    for name, (datatype, *values) in options["inputs"].items():
        texts = [value.encode() if isinstance(value, str) else value for value in values]
        tensor = tritonclient.http.InferInput(name, [1, len(values)], datatype)
        tensor.set_data_from_numpy(numpy.array([texts], _TYPES[datatype]), binary_data=options["binary"])
        inputs.append(tensor)
    outputs = [
        tritonclient.http.InferRequestedOutput(name, binary_data=options["binary"]) for name in options["outputs"]
    ]
    return {"inputs": inputs, "outputs": outputs or None, "request_id": "7", **options.get("more", {})}


def _tensors(found: Any) -> dict[str, Any]:
    response = found.get_response()
    tensors = {one["name"]: found.as_numpy(one["name"]) for one in response["outputs"]}
    texts = {"id": response["id"]}
    for name, tensor in tensors.items():
        values = [value.decode() if isinstance(value, bytes) else value for value in tensor.reshape(-1).tolist()]
        texts[name] = [str(tensor.dtype), [*tensor.shape], values]
    return texts


class Tritonclient:
    """`url` is host:port, `prompt` the model's name."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = tritonclient.http.InferenceServerClient(url)
        if "inputs" in options:
            return _tensors(client.infer(prompt, **_request(options)))
        found = {name: getattr(client, name)() for name in _STATES}
        return found | {name: getattr(client, name)(prompt, **options) for name in _OF_MODEL}

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with tritonclient.http.aio.InferenceServerClient(url) as client:
            if "inputs" in options:
                return _tensors(await client.infer(prompt, **_request(options)))
            found = {name: await getattr(client, name)() for name in _STATES}
            return found | {name: await getattr(client, name)(prompt, **options) for name in _OF_MODEL}

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


main(Tritonclient())
