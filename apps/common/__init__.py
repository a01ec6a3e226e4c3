"""What both apps share: the command line, configuration files, prompt files."""
