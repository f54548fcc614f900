"""Exports of a deployment for CloudFormation, Terraform and SageMaker's Python SDK."""
