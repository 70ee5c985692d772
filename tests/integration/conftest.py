"""A really built Collector and Jaeger, started once for the whole test session."""

from __future__ import annotations

import pytest

from argus_otel.stack import Binaries, GoMissingError, Stack, build_stack, running_stack

# Long enough for four posts in a row on a machine that does other things as well.
DECISION_WAIT_S = 3.0
# A cold build takes minutes on 2 cores; whichever test comes first pays for it.
_BUILD_LIMIT_S = 1800
_BUILDING_FIXTURES = {"binaries", "stack"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that may have to build the stack the time for it."""
    for item in items:
        needed = _BUILDING_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if needed and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_BUILD_LIMIT_S))


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """Executables of the Collector and Jaeger, built if they are not in the cache."""
    try:
        return build_stack()
    except GoMissingError as error:
        pytest.skip(f"no Collector and Jaeger: {error.where} is {error.got}")


@pytest.fixture(scope="session")
def stack(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """The gateway's configuration in front of Jaeger, on free ports; shared, so do not stop it."""
    with running_stack(
        config="gateway",
        decision_wait_s=DECISION_WAIT_S,
        env={"ARGUS_SPANMETRICS_FLUSH": "1s"},
        directory=tmp_path_factory.mktemp("stack"),
        binaries=binaries,
    ) as running:
        yield running
