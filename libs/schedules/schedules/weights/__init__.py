"""Weight sync and weight checks."""
