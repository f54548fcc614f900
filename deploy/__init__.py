"""Deploy the handler to SageMaker endpoints, and call them: `python -m deploy`, `lmi deploy`. See docs/deploy.md.

Imports nothing of `handler` except its load generator: the container is known by its environment and routes only.
"""
