"""The apps: thin compositions of the libraries."""
