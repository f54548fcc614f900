"""Conformance tests for LLM containers: `lmi conform` tests a server against its public contracts."""
