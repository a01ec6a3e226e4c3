"""TODO: schedules."""
