"""The AWS resources of a deployment, and the pure functions that build them from a specification."""
