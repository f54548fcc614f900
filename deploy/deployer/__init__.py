"""Bring the resources in AWS to their desired state: plan, apply, wait and roll back."""
