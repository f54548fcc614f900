"""The section of batch transform."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from deploy.spec.values import OutputUri, Section

MOST_TOGETHER = 100
"""Megabytes of all payloads in flight to an instance, and the most of one (CreateTransformJob)."""


class Batch(Section):
    """Batch transform (`lmi deploy batch`): each line of files in S3 is a request. It needs no endpoint."""

    input: OutputUri = Field(description="S3 URI of JSON lines: an object or a prefix.")
    output: OutputUri = Field(description="S3 URI of the answers, stored as OBJECT.out.")
    concurrency: Annotated[int, Field(ge=1, le=MOST_TOGETHER)] | None = Field(
        None, description="Concurrent requests per instance; default: option.max_rolling_batch_size."
    )
    payload_mb: Annotated[int, Field(ge=1, le=MOST_TOGETHER)] | None = Field(
        None,
        description="Maximum MB of a line; times concurrency, at most 100. Default: 6 or less.",
    )
    timeout: Annotated[int, Field(ge=1, le=3600)] = Field(3600, description="Seconds per line.")
    retries: Annotated[int, Field(ge=0, le=3)] = Field(3, description="Further attempts after a failure.")

    @model_validator(mode="after")
    def _together(self) -> Batch:
        together = (self.concurrency or 1) * (self.payload_mb or 1)
        if together > MOST_TOGETHER:
            raise ValueError(f"concurrency times payload_mb is {together}, and batch transform takes {MOST_TOGETHER}")
        return self
