"""Puts the handler on SageMaker endpoints and talks to it there: `python -m deploy`, `lmi deploy`. docs/deploy.md.

Imports nothing of `handler`: what runs in the container is known here by its environment and its routes only.
"""
