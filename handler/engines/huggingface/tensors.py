"""The tensors of a checkpoint's safetensors files, mapped into memory: a read touches only its own tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.model_files import visible
from handler.core.errors import ConfigError
from handler.engines.huggingface.model_files import read_header, weight_files

TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
"""Types of weights, with numpy's; BF16 is the upper half of float32."""


class Tensor(NamedTuple):
    """A tensor's place: `start` and `end` count the bytes of its file."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class Tensors:
    """The tensors that transformers reads of a directory; without an index all, as other programs write them.

    Raises:
        ConfigError: a file has no header, or a tensor's place, type and shape contradict each other.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._places: dict[str, Tensor] = {}
        for path in weight_files(directory) or visible(directory, "*.safetensors"):
            header, begin = read_header(path)
            self._places |= {name: _tensor(path, name, one, begin) for name, one in header.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def place(self, name: str) -> Tensor:
        """Return a tensor's place.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self._places:
            raise ConfigError(f"{self.directory}: its safetensors have no tensor {name}")
        return self._places[name]

    def weight(self, name: str) -> Tensor:
        """Return the place of a tensor of a type that weights have.

        Raises:
            ConfigError: there is none of this name, or it has another type.
        """
        place = self.place(name)
        if place.kind not in TYPES:
            raise ConfigError(f"{place.path}: {name} is of type {place.kind}, of {', '.join(TYPES)}")
        return place

    def raw(self, name: str) -> Any:
        """Map a weight as it is stored; BF16 as its 16 bits. Raises as `weight`."""
        import numpy

        place = self.weight(name)
        if place.start == place.end:
            return numpy.zeros(place.shape, TYPES[place.kind])
        data = numpy.memmap(place.path, numpy.uint8, "c", place.start, (place.end - place.start,))
        return data.view(TYPES[place.kind]).reshape(place.shape)

    def __getitem__(self, name: str) -> Any:
        """Read a tensor as float32."""
        return as_float32(self.raw(name), self.place(name).kind)


def as_float32(data: Any, kind: str) -> Any:
    """Return stored numbers as float32."""
    import numpy

    if kind == "BF16":
        return (data.astype(numpy.uint32) << 16).view(numpy.float32)
    return data.astype(numpy.float32)


def _tensor(path: Path, name: str, one: Any, data: int) -> Tensor:
    try:
        kind, shape = str(one["dtype"]), tuple(one["shape"])
        first, end = one["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, first, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ConfigError(f"{path} is broken: its header does not say where {name} lies, and in what shape")
    if kind in TYPES:
        needed = math.prod(shape) * int(TYPES[kind][-1])
        if needed != end - first:
            raise ConfigError(
                f"{path} is broken: {name} has {end - first:,} bytes, {kind} {list(shape)} would have {needed:,}"
            )
    return Tensor(path, kind, shape, data + first, data + end)
