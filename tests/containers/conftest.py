import os
from collections.abc import Iterator

import pytest

from support.composition import Composition, missing_engine


@pytest.fixture(scope="session")
def composition() -> Iterator[Composition]:
    """The whole of docker-compose.yml, built and started; afterwards nothing of it is left."""
    reason = missing_engine()
    if reason:
        # Where the engine is part of the machine, its absence is a failure, not a reason to skip.
        assert not os.environ.get("BREADBOX_REQUIRE_CONTAINERS"), reason
        pytest.skip(f"containers cannot be started here: {reason}")
    # The learner is to go on for as long as the tests run.
    running = Composition({"BREADBOX_TARGET_RETURN": "100000", "BREADBOX_NUM_ENVS": "4"})
    try:
        running.build()
        running.up()
        yield running
    finally:
        running.down()
        left = running.leftovers()
        running.remove_images()
    assert [] == left
