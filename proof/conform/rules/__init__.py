"""The rules, in the order in which they are checked. Each rule is a function in one of these modules."""

from proof.conform.rules import (  # noqa: I001  (their order is that of the table)
    hosting,
    requests,
    sagemaker,
    lmi,
    tgi,
    openai,
    anthropic,
    triton,
)

__all__ = ["anthropic", "hosting", "lmi", "openai", "requests", "sagemaker", "tgi", "triton"]
