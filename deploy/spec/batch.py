"""The section of batch transform."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from deploy.spec.values import OutputUri, Section

MOST_TOGETHER = 100
"""Megabytes of all payloads in flight to an instance, and the most of one (CreateTransformJob)."""


class Batch(Section):
    """Batch transform (`lmi deploy batch`): each line of files in S3 is a request. It needs no endpoint."""

    input: OutputUri = Field(description="S3 URI of the input: an object, or a prefix of objects, of JSON lines.")
    output: OutputUri = Field(description="S3 URI below which each object's answers are stored, as OBJECT.out.")
    concurrency: Annotated[int, Field(ge=1, le=MOST_TOGETHER)] | None = Field(
        None, description="Requests at a time per instance; default: option.max_rolling_batch_size, at most 100."
    )
    payload_mb: Annotated[int, Field(ge=1, le=MOST_TOGETHER)] | None = Field(
        None,
        description="Maximum size of a line in MB; times concurrency at most 100. Default: 6, or what that leaves.",
    )
    timeout: Annotated[int, Field(ge=1, le=3600)] = Field(3600, description="Seconds for the answer to a line.")
    retries: Annotated[int, Field(ge=0, le=3)] = Field(3, description="Further attempts where the server fails.")

    @model_validator(mode="after")
    def _together(self) -> Batch:
        together = (self.concurrency or 1) * (self.payload_mb or 1)
        if together > MOST_TOGETHER:
            raise ValueError(f"concurrency times payload_mb is {together}, and batch transform takes {MOST_TOGETHER}")
        return self
