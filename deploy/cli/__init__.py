"""The command line: parse arguments, call the rest of `deploy`, print the result."""
