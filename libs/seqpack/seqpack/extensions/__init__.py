"""Code of a user by name, with typed options of its own: no part of it needs torch."""
