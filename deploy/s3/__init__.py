"""Upload model data to S3, and check whether it can be loaded."""
