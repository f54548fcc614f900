"""Entry point of the container images. It configures and starts the server process (docs/container.md)."""
