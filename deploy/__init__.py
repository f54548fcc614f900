"""Deploy the handler to SageMaker endpoints, and call them: `python -m deploy`, `lmi deploy`. See docs/deploy.md.

This package imports only `handler.config` and `handler.core` from the server. It configures and calls containers only
through environment variables and HTTP routes.
"""
