"""What a deployment consists of in AWS, and the builders that make it from a specification."""
