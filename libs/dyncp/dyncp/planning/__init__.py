"""Which ranks work on which sequences: pure functions of lengths and sizes."""
