"""Entry point of the images: from SageMaker's container to the server's process (docs/container.md)."""
