"""The types of the server's own responses, which belong to no dialect. They declare every field on the wire."""

from __future__ import annotations

from typing import Literal, TypedDict

from handler.protocols.kernel.schema import Count, NotRequired


class ReadyReplicas(TypedDict):
    ready: Count
    total: Count


class ModelState(TypedDict):
    """The response of /ping, which contains the state of the model."""

    status: Literal["Healthy", "Unhealthy"]
    state: str
    reason: NotRequired[str]
    replicas: NotRequired[ReadyReplicas]


class ListedModel(TypedDict):
    modelName: str
    modelUrl: str | None
    status: str


class Models(TypedDict):
    models: list[ListedModel]


class Worker(TypedDict):
    id: Count
    startTime: str
    status: str


class Device(TypedDict):
    deviceType: str
    deviceId: int


class WorkerGroup(TypedDict):
    device: Device
    minWorkers: Count
    maxWorkers: Count
    workers: list[Worker]


class DescribedModel(ListedModel):
    engine: str
    batchSize: Count
    maxBatchDelayMillis: Count
    queueSize: Count
    requestInQueue: Count
    loadedAtStartup: bool
    workerGroups: list[WorkerGroup]


class ModelVersions(TypedDict):
    modelName: str
    models: list[DescribedModel]


class ExecutionParameters(TypedDict):
    MaxConcurrentTransforms: Count
    BatchStrategy: Literal["SINGLE_RECORD"]
    MaxPayloadInMB: Count


# -- adapters ----------------------------------------------------------------------------------------------------


class DescribedAdapter(TypedDict):
    name: str
    id: Count
    src: str
    preload: bool
    pin: bool


class Adapters(TypedDict):
    adapters: list[DescribedAdapter]
    nextPageToken: NotRequired[str]


class AdapterChange(TypedDict):
    """The response to a call that changes an adapter. Only registration returns the adapter's `id`."""

    status: str
    id: NotRequired[Count]


# -- sessions ----------------------------------------------------------------------------------------------------


class SessionAnswer(TypedDict):
    result: str
