"""Terraform is not at hand: names are held against the providers' documentation, copied by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.errors import Refused
from deploy.export.terraform import configuration
from deploy.resources.build import resources
from tests.deploy.cases import settled, spec

EXPORTABLE = ("plain", "single", "components", "asynchronous", "aws-image", "cpu")

_ROLLING = """deployment_config deployment_config.rolling_update_policy
    deployment_config.rolling_update_policy.maximum_batch_size
    deployment_config.rolling_update_policy.maximum_batch_size.type
    deployment_config.rolling_update_policy.maximum_batch_size.value
    deployment_config.rolling_update_policy.maximum_execution_timeout_in_seconds
    deployment_config.rolling_update_policy.wait_interval_in_seconds
    deployment_config.auto_rollback_configuration deployment_config.auto_rollback_configuration.alarms
    deployment_config.auto_rollback_configuration.alarms.alarm_name """
_META = "depends_on lifecycle lifecycle.create_before_destroy // "

# Arguments as the documentation of hashicorp/aws 6 and hashicorp/awscc 1 lists them: those that may occur here.
DOCUMENTED = {
    "aws_sagemaker_model": """name execution_role_arn enable_network_isolation tags primary_container
        primary_container.image primary_container.environment primary_container.model_data_source
        primary_container.model_data_source.s3_data_source primary_container.model_data_source.s3_data_source.s3_uri
        primary_container.model_data_source.s3_data_source.s3_data_type
        primary_container.model_data_source.s3_data_source.compression_type vpc_config vpc_config.subnets
        vpc_config.security_group_ids""",
    "aws_sagemaker_endpoint_configuration": """name execution_role_arn kms_key_arn tags production_variants
        production_variants.variant_name production_variants.model_name production_variants.instance_type
        production_variants.initial_instance_count production_variants.initial_variant_weight
        production_variants.inference_ami_version production_variants.volume_size_in_gb
        production_variants.container_startup_health_check_timeout_in_seconds
        production_variants.model_data_download_timeout_in_seconds production_variants.routing_config
        production_variants.routing_config.routing_strategy production_variants.managed_instance_scaling
        production_variants.managed_instance_scaling.status
        production_variants.managed_instance_scaling.min_instance_count
        production_variants.managed_instance_scaling.max_instance_count async_inference_config
        async_inference_config.client_config
        async_inference_config.client_config.max_concurrent_invocations_per_instance
        async_inference_config.output_config async_inference_config.output_config.s3_output_path
        async_inference_config.output_config.s3_failure_path async_inference_config.output_config.kms_key_id
        async_inference_config.output_config.notification_config
        async_inference_config.output_config.notification_config.success_topic
        async_inference_config.output_config.notification_config.error_topic""",
    "aws_sagemaker_endpoint": _ROLLING
    + """name endpoint_config_name tags deployment_config.blue_green_update_policy
        deployment_config.blue_green_update_policy.traffic_routing_configuration
        deployment_config.blue_green_update_policy.traffic_routing_configuration.type
        deployment_config.blue_green_update_policy.traffic_routing_configuration.wait_interval_in_seconds
        deployment_config.blue_green_update_policy.maximum_execution_timeout_in_seconds
        deployment_config.blue_green_update_policy.termination_wait_in_seconds""",
    "awscc_sagemaker_inference_component": _ROLLING
    + """inference_component_name endpoint_name variant_name runtime_config runtime_config.copy_count tags tags.key
        tags.value specification specification.model_name specification.base_inference_component_name
        specification.container specification.container.artifact_url specification.startup_parameters
        specification.startup_parameters.container_startup_health_check_timeout_in_seconds
        specification.startup_parameters.model_data_download_timeout_in_seconds
        specification.compute_resource_requirements
        specification.compute_resource_requirements.min_memory_required_in_mb
        specification.compute_resource_requirements.number_of_accelerator_devices_required
        specification.compute_resource_requirements.number_of_cpu_cores_required
        specification.data_cache_config specification.data_cache_config.enable_caching""",
    "aws_appautoscaling_target": """max_capacity min_capacity resource_id scalable_dimension service_namespace tags""",
    "aws_appautoscaling_policy": """name policy_type resource_id scalable_dimension service_namespace
        step_scaling_policy_configuration step_scaling_policy_configuration.adjustment_type
        step_scaling_policy_configuration.cooldown step_scaling_policy_configuration.metric_aggregation_type
        step_scaling_policy_configuration.step_adjustment
        step_scaling_policy_configuration.step_adjustment.metric_interval_lower_bound
        step_scaling_policy_configuration.step_adjustment.scaling_adjustment
        target_tracking_scaling_policy_configuration target_tracking_scaling_policy_configuration.target_value
        target_tracking_scaling_policy_configuration.scale_in_cooldown
        target_tracking_scaling_policy_configuration.scale_out_cooldown
        target_tracking_scaling_policy_configuration.predefined_metric_specification
        target_tracking_scaling_policy_configuration.predefined_metric_specification.predefined_metric_type
        target_tracking_scaling_policy_configuration.customized_metric_specification
        target_tracking_scaling_policy_configuration.customized_metric_specification.metric_name
        target_tracking_scaling_policy_configuration.customized_metric_specification.namespace
        target_tracking_scaling_policy_configuration.customized_metric_specification.statistic
        target_tracking_scaling_policy_configuration.customized_metric_specification.dimensions
        target_tracking_scaling_policy_configuration.customized_metric_specification.dimensions.name
        target_tracking_scaling_policy_configuration.customized_metric_specification.dimensions.value""",
    "aws_cloudwatch_metric_alarm": """alarm_name alarm_description alarm_actions comparison_operator datapoints_to_alarm
        dimensions evaluation_periods extended_statistic metric_name namespace period statistic threshold
        treat_missing_data tags""",
}
MAPS = {
    ("aws_sagemaker_model", "primary_container.environment"),
    ("aws_cloudwatch_metric_alarm", "dimensions"),
    *((name, "tags") for name in DOCUMENTED if not name.startswith("awscc")),
}


def exported(case: str, **changes: Any) -> dict[str, Any]:
    return configuration(resources(spec(case, **changes), settled(case)), "eu-west-1")


def paths(kind: str, value: Any, path: str = "") -> Iterator[str]:
    """Of all arguments within, but not the keys of the user's maps."""
    if isinstance(value, list):
        for one in value:
            yield from paths(kind, one, path)
    elif isinstance(value, dict) and (kind, path) not in MAPS:
        for name, one in value.items():
            yield f"{path}.{name}".strip(".")
            yield from paths(kind, one, f"{path}.{name}".strip("."))


@pytest.mark.parametrize("case", EXPORTABLE)
def test_every_argument_is_documented(case: str) -> None:
    for kind, made in exported(case)["resource"].items():
        known = set((DOCUMENTED[kind] + " " + _META).split())
        for name, body in made.items():
            assert set(paths(kind, body)) <= known, f"{kind}.{name}"


@pytest.mark.parametrize("case", EXPORTABLE)
def test_every_address_that_is_named_is_there(case: str) -> None:
    found = exported(case)
    addresses = {f"{kind}.{name}" for kind, made in found["resource"].items() for name in made}
    for made in found["resource"].values():
        for body in made.values():
            assert set(body.get("depends_on", ())) <= addresses
    assert len(addresses) == len(resources(spec(case), settled(case)))
    assert found["output"]["endpoint_name"]["value"] == "${aws_sagemaker_endpoint.endpoint.name}"


def test_the_shape_of_one() -> None:
    found = exported("components")
    assert found["terraform"]["required_providers"].keys() == {"aws", "awscc"}
    assert found["provider"]["awscc"] == {"region": "eu-west-1"}
    config = found["resource"]["aws_sagemaker_endpoint_configuration"]["endpoint_config"]
    assert config["lifecycle"] == {"create_before_destroy": True}
    assert config["production_variants"][0]["managed_instance_scaling"]["min_instance_count"] == 0
    wake = found["resource"]["aws_cloudwatch_metric_alarm"]["alarm_llama_chat_no_capacity"]
    assert wake["alarm_actions"] == ["${aws_appautoscaling_policy.scaling_policy_llama_chat_wake.arn}"]
    assert wake["dimensions"] == {"InferenceComponentName": "llama-chat"}
    component = found["resource"]["awscc_sagemaker_inference_component"]["inference_component_llama_chat"]
    assert component["specification"]["data_cache_config"] == {"enable_caching": True}
    assert {"key": "lmi:deployment", "value": "llama"} in component["tags"]
    assert found["resource"]["aws_sagemaker_endpoint"]["endpoint"]["tags"]["lmi:deployment"] == "llama"
    assert exported("plain")["terraform"]["required_providers"].keys() == {"aws"}


def test_expressions_in_values_are_text() -> None:
    found = exported("plain", environment={"TEMPLATE": "${name} %{if}"})
    environment = found["resource"]["aws_sagemaker_model"]["model"]["primary_container"]["environment"]
    assert environment["TEMPLATE"] == "$${name} %%{if}"


def test_an_update_is_no_longer_than_the_provider_allows() -> None:
    many = {"type": "ml.g6e.xlarge", "count": 20}
    found = exported("plain", instance=many, update={"batch_percent": 5})
    policy = found["resource"]["aws_sagemaker_endpoint"]["endpoint"]["deployment_config"]["rolling_update_policy"]
    assert policy["maximum_execution_timeout_in_seconds"] == 14400


@pytest.mark.parametrize(("case", "message"), [
    ("prefix-aware", r"no argument for ProductionVariants\.RoutingConfig\.PrefixAwareRoutingConfig"),
    ("isolated", r"no argument for ProductionVariants\.VariantInstanceProvisionTimeoutInSeconds"),
    ("isolated-components", r"no argument for VpcConfig"),
])  # fmt: skip
def test_what_the_providers_lack_is_refused_by_name(case: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as raised:
        exported(case)
    assert "CloudFormation" in raised.value.advice


def test_a_key_must_be_an_arn() -> None:
    with pytest.raises(Refused, match=r"a key by its ARN only \(given: alias/lmi\)"):
        exported("plain", encryption={"volume_key": "alias/lmi"})


def test_it_is_json() -> None:
    assert json.loads(json.dumps(exported("asynchronous"))) == exported("asynchronous")
