"""The configuration: option tables, readers for the sources of options, and the files of models and users."""
