"""Rules in the order in which they are checked. Each rule is a function in one of these modules."""

from proof.conform.rules import (  # noqa: I001  (the order of the rules)
    hosting,
    requests,
    sagemaker,
    lmi,
    tgi,
    openai,
    anthropic,
    triton,
    decisions,
    websockets,
)

__all__ = ["anthropic", "decisions", "hosting", "lmi", "openai", "requests", "sagemaker", "tgi", "triton", "websockets"]
