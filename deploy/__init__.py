"""Deploy the handler to SageMaker endpoints, and call them: `python -m deploy`, `lmi deploy`. See docs/deploy.md.

It imports only `handler.config` and `handler.core` of the server, and knows a container by its environment and routes.
"""
