"""What every dialect is made of: requests and replies, streams, errors, readers, parameters, schemas."""
