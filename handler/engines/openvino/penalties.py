"""Serves presence and frequency penalties with a second pipeline. GenAI's formula is wrong for negative logits.

GenAI subtracts these penalties from logits that are not negative, and adds them to all others, as of 2026.4.
The second pipeline adds a constant to all logits, so that none is negative. That changes no probability, and the 32-bit
logits keep their differences to 3e-5. It is compiled from the same weights when it is first needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from handler.engines.base import Step, failed
from handler.engines.openvino.scorers import IDLE_SECONDS, MODEL, load_on_thread

_SHIFT = 512
"""Added to all logits. A logit of less than -512 would still get more likely with its penalties."""


class PenaltyPipeline:
    """A pipeline for the requests with penalties. They wait while it is compiled on a thread.

    Args:
        model: an OpenVINO directory.
        make: function that returns a pipeline for a directory.
    """

    def __init__(self, model: Path, make: Callable[[Path], Any]) -> None:
        self._model = model
        self._make = make
        self._loading: Future[Any] | None = None
        self._waiting: dict[int, Callable[[Any], None]] = {}

    def add(self, key: int, start: Callable[[Any], None]) -> None:
        """Queue a request. `start` is called with the pipeline."""
        self._waiting[key] = start
        if self._loading is None:
            self._loading = load_on_thread(self._load)

    def cancel(self, key: int) -> None:
        """Remove a request that has not started."""
        self._waiting.pop(key, None)

    def step(self, step: Step, *, idle: bool) -> None:
        """Start the queued requests, and advance those that run. If the pipeline cannot be loaded, they all fail.

        Args:
            step: gets the errors.
            idle: whether the engine has nothing else to do, so that the step may wait until the pipeline is loaded.
        """
        loading = self._loading
        seconds = IDLE_SECONDS if idle and self._waiting else 0.0
        if loading is None or not futures.wait([loading], seconds).done:
            return
        waiting, self._waiting = self._waiting, {}
        if (error := loading.exception()) is not None:
            self._loading = None  # later requests try again
            reason = f"the copy of the model that applies penalties cannot be loaded: {error}"
            step.others.extend(failed(key, reason) for key in waiting)
            return
        pipeline = loading.result()
        for start in waiting.values():
            start(pipeline)
        if pipeline.has_non_finished_requests():
            pipeline.step()

    def close(self) -> None:
        """Free the memory of cancelled requests."""
        self._waiting.clear()
        self.step(Step.of([]), idle=False)

    def _load(self) -> Any:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            for path in self._model.absolute().iterdir():
                if path.name != MODEL:
                    (directory / path.name).symlink_to(path)
            (directory / MODEL).write_bytes(shifted((self._model / MODEL).read_bytes()))
            return self._make(directory)


_NODES = """<layers>
<layer id="{constant}" name="shift" type="Clamp" version="opset1"><data min="{shift}" max="{shift}"/>
<input><port id="0" precision="FP32">{size}</port></input>
<output><port id="1" precision="FP32">{size}</port></output></layer>
<layer id="{sum}" name="shifted" type="Add" version="opset1"><data auto_broadcast="numpy"/>
<input><port id="0" precision="FP32">{size}</port><port id="1" precision="FP32">{size}</port></input>
<output><port id="2" precision="FP32" names="logits">{size}</port></output></layer>
</layers>"""
"""Operations that add a constant. A constant of its own would need four bytes in the file of the weights."""


def shifted(graph: bytes) -> bytes:
    """Return a model's graph in OpenVINO's XML with a constant added to its logits. The weights stay the same.

    Raises:
        ValueError: the graph has no 32-bit logits.
    """
    net = ElementTree.fromstring(graph)
    layers, edges = list(net.iterfind("layers/layer")), list(net.iterfind("edges/edge"))
    sources = [(layer, port) for layer in layers for port in layer.iterfind("output/port") if _is_logits(port)]
    if len(sources) != 1:
        raise ValueError("its logits do not have 32 bits")
    [(layer, port)] = sources
    source = {"from-layer": layer.get("id", ""), "from-port": port.get("id", "")}
    constant = max(int(layer.get("id", "")) for layer in layers) + 1
    total = str(constant + 1)
    for edge in edges:
        if source.items() <= edge.attrib.items():
            edge.attrib.update({"from-layer": total, "from-port": "2"})
    del port.attrib["names"]
    size = "".join(ElementTree.tostring(dimension, "unicode") for dimension in port)
    nodes = ElementTree.fromstring(_NODES.format(constant=constant, sum=total, shift=_SHIFT, size=size))
    _part(net, "layers").extend(nodes)
    new = [
        {**source, "to-layer": str(constant), "to-port": "0"},
        {**source, "to-layer": total, "to-port": "0"},
        {"from-layer": str(constant), "from-port": "1", "to-layer": total, "to-port": "1"},
    ]
    _part(net, "edges").extend(ElementTree.Element("edge", ends) for ends in new)
    return ElementTree.tostring(net)


def _is_logits(port: ElementTree.Element) -> bool:
    return "logits" in port.get("names", "").split(",") and port.get("precision") == "FP32"


def _part(net: ElementTree.Element, name: str) -> ElementTree.Element:
    part = net.find(name)
    assert part is not None
    return part
