"""Building blocks of every dialect: requests and replies, streams, errors, readers, parameters, schemas."""
