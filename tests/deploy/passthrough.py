"""Specifications with fields of `sagemaker:`, for the tests of builders, exports, permissions and the double of AWS."""

from __future__ import annotations

from typing import Any

from tests.deploy.cases import KEY, decision, spec

RESERVATION = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/llama-plan"
CAPTURE: dict[str, Any] = {
    "EnableCapture": True,
    "InitialSamplingPercentage": 20,
    "DestinationS3Uri": "s3://captured/llama/",
    "KmsKeyId": KEY,
    "CaptureOptions": [{"CaptureMode": "InputAndOutput"}],
    "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
}
SHADOW: dict[str, Any] = {
    "VariantName": "Shadow",
    "ModelName": "llama-next",
    "InstanceType": "ml.g6e.xlarge",
    "InitialInstanceCount": 1,
    "InitialVariantWeight": 0.25,
}
_COMPONENTS: dict[str, Any] = {
    "instance": {"type": "ml.p5.48xlarge", "managed": {"min": 1, "max": 4}},
    "components": [{"name": "llama-chat", "copies": 2}, {"name": "llama-batch"}],
    "scaling": None,
}

FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-capture": ("plain", {"sagemaker": {"endpoint_config": {"DataCaptureConfig": CAPTURE}}}),
    "shadow": ("plain", {"sagemaker": {"endpoint_config": {"ShadowProductionVariants": [SHADOW]}}}),
    "reservation": (
        "plain",
        {
            "sagemaker": {
                "variant": {
                    "CapacityReservationConfig": {
                        "CapacityReservationPreference": "capacity-reservations-only",
                        "MlReservationArn": RESERVATION,
                    }
                }
            }
        },
    ),
    "partitions": (
        "components",
        {
            **_COMPONENTS,
            "components": [
                {
                    "name": name,
                    "sagemaker": {"Specification": {"ComputeResourceRequirements": {"AcceleratorPartitionType": kind}}},
                }
                for name, kind in (("llama-chat", "mig-4g.40gb"), ("llama-batch", "mig-3g.40gb"))
            ],
            "sagemaker": {
                "variant": {
                    "AcceleratorPartitionLayouts": [{"AcceleratorPartitionTypes": ["mig-4g.40gb", "mig-3g.40gb"]}]
                }
            },
        },
    ),
    "metrics": (
        "plain",
        {
            "sagemaker": {
                "endpoint_config": {
                    "MetricsConfig": {"EnableEnhancedMetrics": True, "MetricPublishFrequencyInSeconds": 10}
                }
            }
        },
    ),
    "scheduling": (
        "components",
        {
            **_COMPONENTS,
            "sagemaker": {
                "component": {
                    "Specification": {
                        "SchedulingConfig": {
                            "PlacementStrategy": "BINPACK",
                            "AvailabilityZoneBalance": {"EnforcementMode": "PERMISSIVE", "MaxImbalance": 20},
                        }
                    }
                }
            },
        },
    ),
    "shell": ("plain", {"sagemaker": {"variant": {"EnableSSMAccess": True}}}),
    "core-dumps": (
        "plain",
        {"sagemaker": {"variant": {"CoreDumpConfig": {"DestinationS3Uri": "s3://dumps/llama/", "KmsKeyId": KEY}}}},
    ),
    "scale-in": (
        "components",
        {
            **_COMPONENTS,
            "sagemaker": {
                "variant": {
                    "ManagedInstanceScaling": {
                        "ScaleInPolicy": {"Strategy": "CONSOLIDATION", "MaximumStepSize": 2, "CooldownInMinutes": 10}
                    }
                }
            },
        },
    ),
    "specifications": (
        "pools",
        {
            "instance": {"count": 2, "pools": [{"type": "ml.g6e.xlarge"}, {"type": "ml.g6.12xlarge"}]},
            "components": [{"name": "llama-chat"}],
            "sagemaker": {
                "component": {
                    "Specifications": [
                        {
                            "InstanceType": "ml.g6.12xlarge",
                            "ComputeResourceRequirements": {"NumberOfAcceleratorDevicesRequired": 4},
                        }
                    ]
                }
            },
        },
    ),
}
"""The field's name: the kind of specification that it is added to, and what is laid over it."""


def specification(field: str, **changes: Any) -> Any:
    case, laid = FIELDS[field]
    return spec(case, **{**laid, **changes})


def decided(field: str) -> Any:
    """The decision for it."""
    case, laid = FIELDS[field]
    changes: dict[str, Any] = {}
    if field == "specifications":
        changes["pools"] = decision("pools").pools[:2]
    elif "instance" in laid:
        changes |= {"instance_type": laid["instance"]["type"], "gpus": 8}
    return decision(case, **changes)
