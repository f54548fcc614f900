"""Upload model data to S3, and check it."""
