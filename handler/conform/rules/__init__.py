"""The rules, in the order in which they are asked. A rule is one function of one of these modules."""

from handler.conform.rules import (  # noqa: I001  (their order is that of the table)
    lifetime,
    hosting,
    streams,
    bad_input,
    disconnects,
    sagemaker,
    lmi,
    tgi,
    openai,
    anthropic,
    triton,
)

__all__ = [
    "anthropic", "bad_input", "disconnects", "hosting", "lifetime", "lmi", "openai", "sagemaker", "streams", "tgi",
    "triton",
]  # fmt: skip
