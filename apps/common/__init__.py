"""Code of both apps: command line, data files, run directory, reports, shrunk runs."""
