"""Chat templates of widespread models: `make test-templates` fetches them."""
