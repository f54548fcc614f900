"""Deploy the handler to SageMaker endpoints, and call them: `python -m deploy`, `lmi deploy`. See docs/deploy.md.

From the server, it imports only `handler.config` and `handler.core`. It uses containers only through their environment
variables and routes.
"""
