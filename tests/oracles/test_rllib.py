"""Goal: the offline pre-learner does what RLlib's does, but for its defects.

Method: run every recorded case. Where a case has a recommended answer, that one counts; where the
original refuses, so must we, in words; else the recorded answer counts. Nothing looks at a case's
name.
"""

from typing import Any

import numpy as np
import pytest

from breadbox_offline.decoding import packing
from breadbox_offline.errors import OfflineDataError
from support.rllib_cases import FOLDER, load_cases, load_codec, restrict
from support.rllib_runner import RUNNERS, SEQUENCES, Alternatives

CASES = load_cases()
TOLERANCE = 1e-5

pytestmark = pytest.mark.skipif(
    not CASES, reason=f"no recorded cases in {FOLDER}; set BREADBOX_ORACLES to their folder"
)

# Of what the original writes beside an answer, these say how it got there, not what it is.
NOT_COMPARED = {"order"}


def difference(mine: Any, expected: Any, case: dict[str, Any]) -> str:
    """Empty if the outcome is the expected one, else a sentence with the path."""
    codec = load_codec()
    if isinstance(mine, Alternatives):
        found = [difference(each, expected, case) for each in mine]
        return "" if "" in found else found[0]
    if isinstance(expected, dict) and isinstance(mine, dict):
        expected = {name: value for name, value in expected.items() if name not in NOT_COMPARED}
        missing = sorted(expected.keys() - mine.keys())
        if missing and "__nd__" not in expected:
            return f"nothing to compare with {missing}"
    compares_dtypes = not any(how == "ignore" for how in case["compare"].values())
    return codec.same(
        codec.enc(restrict(mine, expected)), expected, atol=TOLERANCE, dtype=compares_dtypes
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case_has_the_recorded_or_recommended_answer(case: dict[str, Any]) -> None:
    given = load_codec().dec(case["input"])
    run = RUNNERS.get(case["mode"])
    if run is None:
        pytest.skip(f"no case of mode {case['mode']!r} was known when this was written")
    ends = "non_terminating" in case["expected"]
    if case["negative"] and not case["recommended"] and not ends:
        with pytest.raises(OfflineDataError) as raised:
            run(case, given)
        assert str(raised.value)
        return
    outcome = run(case, given)
    if case["recommended"]:
        demand_recommended(case, given, outcome)
    elif not ends:
        assert "" == difference(outcome, case["expected"], case)


def demand_recommended(case: dict[str, Any], given: Any, outcome: Any) -> None:
    """Compare with an answer that is better than the original's."""
    recommended = case["recommended"]
    if isinstance(recommended, str):
        demand_sentence(recommended, given, outcome)
        return
    for fact, wanted in recommended.items():
        mine = outcome[fact] if fact in outcome else fact_of_episodes(fact, outcome)
        found = difference({fact: mine}, {fact: wanted}, case)
        assert "" == found, f"{fact}: {found}"


def fact_of_episodes(fact: str, outcome: Any) -> Any:
    """One fact of every episode of an outcome, such as `lengths` or `terminated`."""
    episodes = outcome["episodes"]
    if fact == "obs_dtype":
        (dtype,) = {episode["observations"].dtype.name for episode in episodes}
        return dtype
    singular = {"lengths": "length", "ids": "id"}.get(fact, fact)
    return [episode[singular] for episode in episodes]


def demand_sentence(recommended: str, given: Any, outcome: Any) -> None:
    """Check what a sentence asks for; to get here at all, the input was accepted."""
    sequences = SEQUENCES.fullmatch(recommended)
    if sequences:
        lengths = [episode["length"] for episode in outcome["episodes"]]
        assert [int(sequences[2])] * int(sequences[1]) == lengths
    columns = given.get("columns", {})
    if "new_obs" in columns and "episodes" in outcome:
        for row, episode in enumerate(outcome["episodes"]):
            recorded = packing.unpack_if_packed(columns["new_obs"][row])
            final = packing.unpack_if_packed(recorded[-1])
            np.testing.assert_array_equal(episode["observations"][-1], final)
    if "infos" in columns and "episodes" in outcome:
        for row, episode in enumerate(outcome["episodes"]):
            recorded = list(columns["infos"][row])
            assert recorded == episode["infos"][-len(recorded) :]
