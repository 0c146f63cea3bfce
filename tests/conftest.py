"""Hypothesis profiles: `ci` repeats itself; HYPOTHESIS_PROFILE=nightly looks far and wide.

`quick` is that of `make test-quick`.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)
settings.register_profile(
    "nightly",
    max_examples=100_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
