"""The command line of `deploy`, which parses arguments, calls the other packages and prints the result."""
