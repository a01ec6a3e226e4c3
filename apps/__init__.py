"""The apps: thin compositions of the libraries."""

__version__ = "0.1.0"
