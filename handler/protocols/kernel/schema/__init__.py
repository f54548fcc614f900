"""JSON Schema of requests and answers, for the API's document."""
