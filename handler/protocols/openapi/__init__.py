"""The API as an OpenAPI 3.1 document."""
