"""What the API's document says of requests and routes."""
