"""Model data on its way to S3, and what is wrong with it there."""
