from collections.abc import Iterator

import pytest

from gloo import Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Three processes, for all tests of a module; other modules count processes."""
    team = Workers(3)
    yield team
    team.stop()
