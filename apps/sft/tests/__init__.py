"""End-to-end tests of the sft app."""
