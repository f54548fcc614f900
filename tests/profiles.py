"""Numbers of examples that hypothesis tries: `make test` the same few each time, `make test-fuzz` many, at random."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # an example may be a request to a server

settings.register_profile("fewest", max_examples=5, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("few", max_examples=20, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("many", max_examples=100, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("few")  # `pytest --hypothesis-profile many` for another
