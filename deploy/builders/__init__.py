"""One file a kind: parts of a specification as boto3 requests. `deploy.build` puts them together."""
