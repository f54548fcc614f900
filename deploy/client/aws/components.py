"""Find the inference component of a request that names none."""

from __future__ import annotations

from typing import Any

from deploy import web_pages
from deploy.client.aws.failures import FROM_AWS, failure
from deploy.client.errors import NotSent, RequestFailed


def only_component(session: Any, region: str, endpoint_name: str) -> str:
    """Return the endpoint's only component; adapters do not count.

    Args:
        session: boto3's. Calls ListInferenceComponents, and DescribeInferenceComponent if there are several.

    Raises:
        NotSent: there is none, or there are several.
        RequestFailed: AWS refuses to list them.
    """
    client = web_pages.refused(session.client("sagemaker", region_name=region))
    try:
        pages = client.get_paginator("list_inference_components").paginate(EndpointNameEquals=endpoint_name)
        names = [item["InferenceComponentName"] for page in pages for item in page["InferenceComponents"]]
        if len(names) > 1:
            names = [name for name in names if not _is_adapter(client, name)]
    except FROM_AWS as error:
        raise _cannot_list(failure(error), endpoint_name) from error
    if len(names) == 1:
        return str(names[0])
    if not names:
        raise NotSent(f"{endpoint_name} has no inference component yet", "Has `lmi deploy up` ended?")
    raise NotSent(
        f"{endpoint_name} has several inference components: {', '.join(sorted(names))}",
        "Name one: component=, or --component.",
    )


def _is_adapter(client: Any, name: str) -> bool:
    specification = client.describe_inference_component(InferenceComponentName=name).get("Specification", {})
    return "BaseInferenceComponentName" in specification


def _cannot_list(error: RequestFailed, endpoint_name: str) -> RequestFailed:
    error.args = (f"{endpoint_name} needs the name of an inference component, and they cannot be listed: {error}",)
    error.advice = "Name one: component=, or --component."
    return error
