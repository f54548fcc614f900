"""SageMaker on one's own machine: the container's process, and SageMaker Runtime's API before it. docs/local.md."""
