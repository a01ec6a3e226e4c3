"""For pytest by hand: property tests without deadlines, which a busy machine misses (Bazel's runner says the same)."""

from hypothesis import settings

settings.register_profile("by hand", deadline=None)
settings.load_profile("by hand")
