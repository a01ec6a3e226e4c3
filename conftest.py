"""For pytest by hand: property tests of all libraries without the time limits, which a busy machine misses.

The examples are new ones in each run. Under Bazel, build/pytest_main.py sets the same without the randomness.
"""

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine without it runs the other tests
    pass
else:
    settings.register_profile("by hand", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("by hand")
