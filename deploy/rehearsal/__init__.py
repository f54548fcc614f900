"""AWS on this machine: moto's server with what it lacks, for `lmi deploy local --aws` and for tests (docs/local.md)."""
