"""A folder for the path of a process: what is in it is imported by its bare name."""
