"""The start of both hosts: from the options to a served model."""
