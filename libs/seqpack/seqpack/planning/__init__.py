"""Which sequences go together: pure functions of lengths and costs."""
