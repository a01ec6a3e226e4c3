"""Command lines: flags and files to a configuration."""
