"""Exports of a deployment: CloudFormation and Terraform."""
