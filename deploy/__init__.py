"""Deploy the handler to SageMaker endpoints, and call them: `python -m deploy`, `lmi deploy`. See docs/deploy.md.

Imports nothing from `handler` except its load generator: it knows the container only by its environment and routes.
"""
