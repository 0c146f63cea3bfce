"""Which weights a paced player may begin a fragment with."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from breadbox_rollout.acting.player import Player


class Asked:
    """A pacer whose tickets are of version 2."""

    def wait(self, workers: Sequence[str], session_id: str, *, model_version: int | None) -> bool:
        assert (["w0", "w1"], "s") == (workers, session_id)
        return model_version is not None and model_version >= 2


@pytest.mark.parametrize(("version", "may"), [(1, False), (2, True)])
def test_a_paced_player_acts_once_it_has_the_weights_of_its_tickets(
    version: int, may: bool
) -> None:
    slots = [SimpleNamespace(fragmenter=SimpleNamespace(worker_id=f"w{row}")) for row in range(2)]
    player: Any = SimpleNamespace(
        sender=SimpleNamespace(pacer=Asked()),
        model=SimpleNamespace(session_id="s", model_version=version),
        in_session=True,
        _slots=[slots],
    )
    assert may is Player.may_act(cast(Player, player), 0)
