"""Kinds of devices: the only place that calls what torch has for each of them under a name of its own."""
