"""A loaded model and its requests in flight, whatever drives it."""
