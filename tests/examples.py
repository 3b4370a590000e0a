"""How many random examples the property tests try.

``few``, the default, takes a quarter of each test's number, and the same examples every time: a change fails for what it does.
``--hypothesis-profile all`` (``make test-all``) takes all of them, other ones every time, and ``many`` ten times as many.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_ALL = 100  # the default of hypothesis, for a test that names no number

# A busy machine, or one that has to compile first, makes a test slow, not wrong; and a directory may serve all examples.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.register_profile("few", _PATIENT, max_examples=_ALL // 4, derandomize=True)
settings.register_profile("all", _PATIENT, max_examples=_ALL, derandomize=False)
settings.register_profile("many", _PATIENT, max_examples=10 * _ALL, derandomize=False)
settings.load_profile("few")


def examples(count: int) -> settings:
    """The settings of a test whose number of examples is ``count`` in full; at least 3 are tried."""
    default = settings.default
    assert default is not None  # the profile that is loaded above
    return settings(max_examples=max(3, count * default.max_examples // _ALL))
