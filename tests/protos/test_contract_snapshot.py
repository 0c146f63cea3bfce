"""The wire contract is what was committed: a change that breaks a peer must be deliberate.

To accept a change: `PYTHONPATH=tests python tests/protos/test_contract_snapshot.py`; the commit
says why no deployed peer breaks.
"""

import json
from pathlib import Path

from support import descriptors

SNAPSHOT = Path(__file__).with_name("contract.json")


def test_numbers_types_and_methods_are_those_of_the_snapshot() -> None:
    committed = json.loads(SNAPSHOT.read_text())
    now = descriptors.contract()
    assert sorted(committed) == sorted(now)
    assert committed == now


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(descriptors.contract(), indent=1, sort_keys=True) + "\n")
