"""Emulate SageMaker on this machine: a container's process, and SageMaker Runtime's API before it (docs/local.md)."""
