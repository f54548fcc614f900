"""A served model and its requests in flight, for HTTP and for DJL."""
