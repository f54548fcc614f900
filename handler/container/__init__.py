"""Entry point of the container images. It configures and starts the server's process (docs/container.md)."""
