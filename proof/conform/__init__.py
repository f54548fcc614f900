"""A conformance kit for LLM containers: `lmi conform` tests what a server's public contracts promise."""
