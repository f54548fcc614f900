"""Resources of a deployment in AWS, and the pure functions that build them from a specification."""
