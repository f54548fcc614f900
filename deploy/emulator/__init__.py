"""Emulator of SageMaker on this machine: a container process behind SageMaker Runtime's API (docs/local.md)."""
