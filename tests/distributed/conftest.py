from collections.abc import Iterator

import pytest

from gloo import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Three processes, for all tests of a module; other modules count processes."""
    team = Processes(3)
    yield team
    team.stop()
