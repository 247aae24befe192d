from collections.abc import Iterator

import pytest

from gloo import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Three processes, for all tests of this directory."""
    team = Workers(3)
    yield team
    team.stop()
