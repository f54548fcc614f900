"""The configuration: option tables, and readers for their sources and for the files of models and users."""
