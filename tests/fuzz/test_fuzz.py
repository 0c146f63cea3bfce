"""All that fuzzing has found stays mended, and each target is tried a little further."""

import random
from pathlib import Path

import pytest

from fuzz.mutation import mutate
from fuzz.targets import TARGETS, Target

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CORPUS = Path(__file__).parent / "corpus"
SEED = 20_260_101


def inputs_of(name: str, target: Target) -> list[bytes]:
    kept = sorted((CORPUS / name).glob("*"))
    return [*target.seeds(), *(path.read_bytes() for path in kept)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_what_nobody_wrote_on_purpose_is_refused_as_it_should(name: str) -> None:
    target = TARGETS[name]
    if name in ("hdf5", "minari-metadata"):
        pytest.importorskip("minari", reason="needs minari, of the extra breadbox[minari]")
    given = inputs_of(name, target)
    rng = random.Random(SEED)
    # Libraries that are not ours may end the process; only `make fuzz` has one to spare.
    count = 0 if name in ("parquet", "hdf5") else 500 if target.is_quick else 60
    tried = [mutate(rng, given, 1 << 16) for _ in range(count)]
    for data in [*given, *tried]:
        try:
            target.try_one(data)
        except Exception as error:
            raise AssertionError(f"{name} does not refuse {data!r}, seed {SEED}") from error


def test_seeds_are_read(tmp_path: Path) -> None:
    """Targets begin with inputs that are right, or they would only try what is refused at once."""
    refused = []
    for name, target in TARGETS.items():
        for data in target.seeds():
            try:
                target.read(data)
            except target.refusals as error:
                refused.append((name, str(error)))
    assert [] == [each for each in refused if each[0] not in ("manifest",)]
