"""Export for KServe: an InferenceService with the server as custom predictor, deployed by KServe's Standard mode."""

from __future__ import annotations

from dataclasses import replace

from deploy.export.kubernetes import pod, rollout, scrape, with_pods
from deploy.export.manifests import Manifest, Server, bounds, servers
from deploy.resolve.decision import Decision
from deploy.resources.environment import MODEL_DATA
from deploy.spec import Spec

_MOUNTED = "/mnt/models"
"""Where KServe puts the files of a custom container's STORAGE_URI."""


def kserve_manifests(
    spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False
) -> tuple[list[Manifest], list[str]]:
    """Return the objects, and what to know about them: a sentence each.

    Raises:
        Refused: a setting has no place in KServe and its loss would do harm.
    """
    every = servers(spec, decision, allow_plaintext_secret=allow_plaintext_secret)
    return with_pods(spec, every, lambda server: [_service(server)], suffix="-predictor")


def _service(server: Server) -> Manifest:
    spec, prefix = server.spec, server.decision.model_data
    if prefix is not None:
        server = replace(server, variables=_mounted(server, prefix))
    least, most = (server.copies, server.copies) if spec.scaling is None else bounds(spec.scaling)
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": server.name,
            "annotations": {
                "serving.kserve.io/deploymentMode": "RawDeployment",  # newer versions call it Standard, and take both
                "serving.kserve.io/autoscalerClass": "external",  # KServe's own would scale by CPU
                **scrape(server),
            },
        },
        "spec": {
            "predictor": {
                "minReplicas": least,
                "maxReplicas": most,
                "deploymentStrategy": rollout(spec),
                **pod(server, "kserve-container"),
            }
        },
    }


def _mounted(server: Server, prefix: str) -> dict[str, str]:
    """Return the environment with the model where KServe puts it."""
    moved = {
        name: _MOUNTED + value.removeprefix(MODEL_DATA)
        if value == MODEL_DATA or value.startswith(f"{MODEL_DATA}/")
        else value
        for name, value in server.variables.items()
    }
    return {**moved, "SAGEMAKER_MODEL_PATH": _MOUNTED, "STORAGE_URI": prefix}
