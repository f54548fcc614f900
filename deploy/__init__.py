"""Deploy the handler to SageMaker endpoints, and call them: `python -m deploy`, `lmi deploy`. See docs/deploy.md.

Of the server's packages, it imports only `handler.config` and `handler.core`. It configures and calls containers only
through environment variables and HTTP routes.
"""
