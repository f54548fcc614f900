"""Calls by tritonclient's four clients, by their names: whatever the server's state is, infer, and gRPC's streams."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from common import main

_DOORS = {"http": tritonclient.http, "grpc": tritonclient.grpc}
_ASYNCHRONOUS = {"http": tritonclient.http.aio, "grpc": tritonclient.grpc.aio}
_TYPES = {"BYTES": object, "INT32": numpy.int32, "BOOL": bool, "FP32": numpy.float32, "UINT64": numpy.uint64}
_SECONDS = 100


def _request(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of infer. `options` has the inputs, each a datatype and its values, and what else infer takes."""
    module, inputs = _DOORS[options["door"]], []
    # gRPC has no other form than binary data
    form = {"binary_data": options.get("binary", True)} if options["door"] == "http" else {}
    for name, (datatype, *values) in options["inputs"].items():
        texts = [value.encode() if isinstance(value, str) else value for value in values]
        tensor = module.InferInput(name, [1, len(values)], datatype)
        tensor.set_data_from_numpy(numpy.array([texts], _TYPES[datatype]), **form)
        inputs.append(tensor)
    outputs = [module.InferRequestedOutput(name, **form) for name in options.get("outputs", [])]
    return {"inputs": inputs, "outputs": outputs or None, "request_id": "7", **options.get("more", {})}


def _tensors(found: Any) -> dict[str, Any]:
    response = found.get_response()
    if not isinstance(response, dict):
        names, id = [one.name for one in response.outputs], response.id
    else:
        names, id = [one["name"] for one in response["outputs"]], response["id"]
    texts: dict[str, Any] = {"id": id}
    for name in names:
        tensor = found.as_numpy(name)
        values = [value.decode() if isinstance(value, bytes) else value for value in tensor.reshape(-1).tolist()]
        texts[name] = [str(tensor.dtype), [*tensor.shape], values]
    return texts


class Tritonclient:
    """`url` is host:port, `prompt` the model's name. `options` have the door, the method, and its arguments."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = _DOORS[options["door"]].InferenceServerClient(url)
        try:
            method = options.get("method", "infer")
            if method == "async_infer":
                return self._later(client, prompt, options)
            if method == "infer":
                return _tensors(client.infer(prompt, **_request(options)))
            return _call(client, method, prompt, options)
        finally:
            client.close()

    def _later(self, client: Any, prompt: str, options: dict[str, Any]) -> Any:
        if options["door"] == "http":
            return _tensors(client.async_infer(prompt, **_request(options)).get_result())
        results: queue.Queue[Any] = queue.Queue()
        future = client.async_infer(
            prompt, callback=lambda result, error: results.put((result, error)), **_request(options)
        )
        if "cancel_after" in options:
            time.sleep(options["cancel_after"])
            future.cancel()
        result, error = results.get(timeout=_SECONDS)
        if error is not None:
            raise error
        return _tensors(result)

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        client = _DOORS[options["door"]].InferenceServerClient(url)
        results: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: results.put((result, error)))
        for number in range(options.get("requests", 1)):
            client.async_stream_infer(prompt, **{**_request(options), "request_id": str(number)})
        if "cancel_after" in options:
            yield _event(*results.get(timeout=_SECONDS))
            client.stop_stream(cancel_requests=True)
        else:
            client.stop_stream()
        while not results.empty():
            yield _event(*results.get())
        client.close()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = _ASYNCHRONOUS[options["door"]].InferenceServerClient(url)
        try:
            method = options.get("method", "infer")
            if method in ("infer", "async_infer"):
                call = asyncio.ensure_future(client.infer(prompt, **_request(options)))
                if "cancel_after" in options:
                    await asyncio.sleep(options["cancel_after"])
                    call.cancel()
                try:
                    return _tensors(await call)
                except asyncio.CancelledError:
                    raise RuntimeError("cancelled") from None
            return await _call(client, method, prompt, options)
        finally:
            await client.close()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        client = _ASYNCHRONOUS[options["door"]].InferenceServerClient(url)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(options.get("requests", 1)):
                yield {"model_name": prompt, **_request(options), "request_id": str(number)}

        answers = client.stream_infer(requests())
        with contextlib.suppress(asyncio.CancelledError):  # what a call that its client cancels ends with
            async for result, error in answers:
                yield _event(result, error)
                if "cancel_after" in options:
                    answers.cancel()
        await client.close()


def _event(result: Any, error: Any) -> Any:
    if error is not None:
        return {"error": error.message(), "status": error.status()}
    final = result.get_response().parameters.get("triton_final_response")
    return {**_tensors(result), "final": final is not None and final.bool_param}


def _call(client: Any, method: str, prompt: str, options: dict[str, Any]) -> Any:
    """Call a method. Its arguments begin with the model's name where it has one."""
    call, arguments = getattr(client, method), dict(options.get("arguments", {}))
    names = inspect.signature(call).parameters
    if "as_json" in names:
        arguments["as_json"] = True
    if "model_name" in names:
        arguments.setdefault("model_name", prompt)
    return call(**arguments)


main(Tritonclient())
