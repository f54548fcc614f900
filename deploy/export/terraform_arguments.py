"""What Terraform's providers call the API's parameters: the documentation of hashicorp/aws and hashicorp/awscc, 2026.

A parameter maps to its argument's name and what is below it: None for a plain value, MAP for a map of texts, else a
table. A parameter that is missing here has no argument there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.resources.resource import Kind

Arguments = Mapping[str, tuple[str, Any]]

MAP: Arguments = {}
"""The mark of a map whose keys are the user's."""


def _plain(**names: str) -> dict[str, tuple[str, Any]]:
    return {parameter: (argument, None) for parameter, argument in names.items()}


_TAGS: Arguments = {"Tags": ("tags", MAP)}
_SIZE = _plain(Type="type", Value="value")
_TIMES = _plain(
    ModelDataDownloadTimeoutInSeconds="model_data_download_timeout_in_seconds",
    ContainerStartupHealthCheckTimeoutInSeconds="container_startup_health_check_timeout_in_seconds",
)
_ROLLBACK: Arguments = {
    "AutoRollbackConfiguration": (
        "auto_rollback_configuration",
        {"Alarms": ("alarms", _plain(AlarmName="alarm_name"))},
    )
}
_ROLLING: Arguments = {
    "RollingUpdatePolicy": (
        "rolling_update_policy",
        {
            "MaximumBatchSize": ("maximum_batch_size", _SIZE),
            **_plain(
                WaitIntervalInSeconds="wait_interval_in_seconds",
                MaximumExecutionTimeoutInSeconds="maximum_execution_timeout_in_seconds",
            ),
        },
    )
}

_MODEL: Arguments = {
    **_plain(
        ModelName="name", ExecutionRoleArn="execution_role_arn", EnableNetworkIsolation="enable_network_isolation"
    ),
    "PrimaryContainer": (
        "primary_container",
        {
            **_plain(Image="image"),
            "Environment": ("environment", MAP),
            "ModelDataSource": (
                "model_data_source",
                {
                    "S3DataSource": (
                        "s3_data_source",
                        _plain(S3Uri="s3_uri", S3DataType="s3_data_type", CompressionType="compression_type"),
                    )
                },
            ),
        },
    ),
    "VpcConfig": ("vpc_config", _plain(SecurityGroupIds="security_group_ids", Subnets="subnets")),
    **_TAGS,
}

_VARIANT: Arguments = {
    **_plain(
        VariantName="variant_name",
        ModelName="model_name",
        InstanceType="instance_type",
        InitialInstanceCount="initial_instance_count",
        InitialVariantWeight="initial_variant_weight",
        InferenceAmiVersion="inference_ami_version",
        VolumeSizeInGB="volume_size_in_gb",
    ),
    **_TIMES,
    # Its RoutingStrategy knows no PREFIX_AWARE either, and it has no VariantInstanceProvisionTimeoutInSeconds.
    "RoutingConfig": ("routing_config", _plain(RoutingStrategy="routing_strategy")),
    "ManagedInstanceScaling": (
        "managed_instance_scaling",
        _plain(Status="status", MinInstanceCount="min_instance_count", MaxInstanceCount="max_instance_count"),
    ),
}

_ENDPOINT_CONFIG: Arguments = {  # no VpcConfig, no EnableNetworkIsolation
    **_plain(EndpointConfigName="name", ExecutionRoleArn="execution_role_arn", KmsKeyId="kms_key_arn"),
    "ProductionVariants": ("production_variants", _VARIANT),
    "AsyncInferenceConfig": (
        "async_inference_config",
        {
            "ClientConfig": (
                "client_config",
                _plain(MaxConcurrentInvocationsPerInstance="max_concurrent_invocations_per_instance"),
            ),
            "OutputConfig": (
                "output_config",
                {
                    **_plain(S3OutputPath="s3_output_path", S3FailurePath="s3_failure_path", KmsKeyId="kms_key_id"),
                    "NotificationConfig": (
                        "notification_config",
                        _plain(SuccessTopic="success_topic", ErrorTopic="error_topic"),
                    ),
                },
            ),
        },
    ),
    **_TAGS,
}

_ENDPOINT: Arguments = {
    **_plain(EndpointName="name", EndpointConfigName="endpoint_config_name"),
    "DeploymentConfig": (
        "deployment_config",
        {
            **_ROLLING,
            "BlueGreenUpdatePolicy": (
                "blue_green_update_policy",
                {
                    "TrafficRoutingConfiguration": (
                        "traffic_routing_configuration",
                        {
                            **_plain(Type="type", WaitIntervalInSeconds="wait_interval_in_seconds"),
                            "CanarySize": ("canary_size", _SIZE),
                        },
                    ),
                    **_plain(
                        TerminationWaitInSeconds="termination_wait_in_seconds",
                        MaximumExecutionTimeoutInSeconds="maximum_execution_timeout_in_seconds",
                    ),
                },
            ),
            **_ROLLBACK,
        },
    ),
    **_TAGS,
}

_COMPONENT: Arguments = {  # awscc, whose names are CloudFormation's
    **_plain(
        InferenceComponentName="inference_component_name", EndpointName="endpoint_name", VariantName="variant_name"
    ),
    "Specification": (
        "specification",
        {
            **_plain(ModelName="model_name", BaseInferenceComponentName="base_inference_component_name"),
            "Container": ("container", _plain(ArtifactUrl="artifact_url")),
            "StartupParameters": ("startup_parameters", _TIMES),
            "ComputeResourceRequirements": (
                "compute_resource_requirements",
                _plain(
                    NumberOfCpuCoresRequired="number_of_cpu_cores_required",
                    NumberOfAcceleratorDevicesRequired="number_of_accelerator_devices_required",
                    MinMemoryRequiredInMb="min_memory_required_in_mb",
                ),
            ),
            "DataCacheConfig": ("data_cache_config", _plain(EnableCaching="enable_caching")),
        },
    ),
    "RuntimeConfig": ("runtime_config", _plain(CopyCount="copy_count")),
    "DeploymentConfig": ("deployment_config", {**_ROLLING, **_ROLLBACK}),
    "Tags": ("tags", _plain(Key="key", Value="value")),
}

_PLACE = _plain(ServiceNamespace="service_namespace", ResourceId="resource_id", ScalableDimension="scalable_dimension")

_SCALABLE_TARGET: Arguments = {**_PLACE, **_plain(MinCapacity="min_capacity", MaxCapacity="max_capacity"), **_TAGS}

_SCALING_POLICY: Arguments = {
    **_PLACE,
    **_plain(PolicyName="name", PolicyType="policy_type"),
    "TargetTrackingScalingPolicyConfiguration": (
        "target_tracking_scaling_policy_configuration",
        {
            **_plain(
                TargetValue="target_value", ScaleInCooldown="scale_in_cooldown", ScaleOutCooldown="scale_out_cooldown"
            ),
            "PredefinedMetricSpecification": (
                "predefined_metric_specification",
                _plain(PredefinedMetricType="predefined_metric_type"),
            ),
            "CustomizedMetricSpecification": (
                "customized_metric_specification",
                {
                    **_plain(MetricName="metric_name", Namespace="namespace", Statistic="statistic"),
                    "Dimensions": ("dimensions", _plain(Name="name", Value="value")),
                },
            ),
        },
    ),
    "StepScalingPolicyConfiguration": (
        "step_scaling_policy_configuration",
        {
            **_plain(
                AdjustmentType="adjustment_type",
                MetricAggregationType="metric_aggregation_type",
                Cooldown="cooldown",
            ),
            "StepAdjustments": (
                "step_adjustment",
                _plain(MetricIntervalLowerBound="metric_interval_lower_bound", ScalingAdjustment="scaling_adjustment"),
            ),
        },
    ),
}

_ALARM: Arguments = {
    **_plain(
        AlarmName="alarm_name",
        AlarmDescription="alarm_description",
        AlarmActions="alarm_actions",
        Namespace="namespace",
        MetricName="metric_name",
        Statistic="statistic",
        ExtendedStatistic="extended_statistic",
        Period="period",
        EvaluationPeriods="evaluation_periods",
        DatapointsToAlarm="datapoints_to_alarm",
        Threshold="threshold",
        ComparisonOperator="comparison_operator",
        TreatMissingData="treat_missing_data",
    ),
    "Dimensions": ("dimensions", MAP),
    **_TAGS,
}

ARGUMENTS: Mapping[Kind, Arguments] = {
    Kind.MODEL: _MODEL,
    Kind.ENDPOINT_CONFIG: _ENDPOINT_CONFIG,
    Kind.ENDPOINT: _ENDPOINT,
    Kind.COMPONENT: _COMPONENT,
    Kind.SCALABLE_TARGET: _SCALABLE_TARGET,
    Kind.SCALING_POLICY: _SCALING_POLICY,
    Kind.ALARM: _ALARM,
}
