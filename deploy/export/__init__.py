"""Exports of a deployment: CloudFormation and Terraform; Kubernetes, KServe and SageMaker HyperPod."""
