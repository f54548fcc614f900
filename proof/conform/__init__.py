"""A conformance kit for LLM containers: `lmi conform` asks a server what its public contracts promise."""
