"""The container's entry point: from what SageMaker gives a container to the server's process (docs/container.md)."""
