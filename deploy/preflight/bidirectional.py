"""Checks what SageMaker needs to open bidirectional streams, if they are requested or their options are set.

See https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

from collections.abc import Iterator

from deploy.preflight.check import Check, Context, error, ok, warning
from deploy.preflight.model import image_labels
from deploy.resolve.images import AMI_CUDA_13, LISTED_AMIS
from deploy.spec.options import variable_of

LABEL = "com.amazonaws.sagemaker.capabilities.bidirectional-streaming"
"""Label of images to which SageMaker opens WebSockets, if its value is `true`."""

_NAME = "bidirectional"
_MAX = "OPTION_WEBSOCKETS_MAX"
_OPTIONS = (_MAX, "OPTION_WEBSOCKETS_SECONDS", "OPTION_WEBSOCKETS_COMPRESSION")
_ACTION = "sagemaker:InvokeEndpointWithBidirectionalStream"
_HANGS = "Otherwise the WebSocket is never opened, and the call seems to hang."


def bidirectional(context: Context) -> Iterator[Check]:
    """Check the kind of endpoint, the host AMI and the image's label. Check nothing unless streams are requested."""
    settings = _settings(context)
    if not (context.bidirectional or settings) or (settings.get(_MAX) == "0" and not context.bidirectional):
        return
    problems = [*_of_endpoint(context, settings), *_of_host(context), *_of_image(context)]
    yield from problems
    if not problems:
        yield ok(_NAME, f"callers need {_ACTION}, which `lmi deploy iam --who invoker` allows")


def _settings(context: Context) -> dict[str, str]:
    """Return the variables of the container that are options of WebSockets."""
    options = {variable_of(name): str(value) for name, value in context.spec.options.items()}
    return {name: value for name, value in {**options, **context.spec.environment}.items() if name in _OPTIONS}


def _of_endpoint(context: Context, settings: dict[str, str]) -> Iterator[Check]:
    if settings.get(_MAX) == "0":
        yield error(_NAME, "websockets_max: 0 turns WebSockets off", "Remove the option.")
    if context.spec.components:
        says = "InvokeEndpointWithBidirectionalStream cannot name a component"
        yield warning(_NAME, says, "Deploy the model without components.")
    if context.spec.asynchronous:
        yield warning(_NAME, "asynchronous endpoints have no bidirectional streams", "Remove `asynchronous`.")
    if context.spec.environment.get("LMI_FRONT") == "djl":
        yield warning(_NAME, "DJL Serving refuses WebSockets", "Set LMI_FRONT to embedded.")


def _of_host(context: Context) -> Iterator[Check]:
    decision = context.decision
    if decision.gpus and decision.ami in {None, *LISTED_AMIS} - {AMI_CUDA_13}:
        says = f"{decision.instance_type} needs a recent host, but instance.ami is {decision.ami or 'the default'}"
        advice = f"Use an image with CUDA 13 and instance.ami: {AMI_CUDA_13}. {_HANGS}"
        yield warning(_NAME, says, advice)


def _of_image(context: Context) -> Iterator[Check]:
    labels = image_labels(context)
    if labels is None:
        says = "the image's labels were not read"
        yield warning(_NAME, says, f"Check that it has the label {LABEL}=true. {_HANGS}")
    elif labels.get(LABEL) != "true":
        advice = f"Build the image again, as our Dockerfile sets the label, or add LABEL {LABEL}=true. {_HANGS}"
        yield warning(_NAME, f"the image lacks the label {LABEL}=true", advice)
