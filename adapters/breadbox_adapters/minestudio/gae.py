"""Advantages over the fragments of a batch, as MineStudio reckons them (online.utils.train.gae)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breadbox_adapters.minestudio.datatypes import FragmentDataDict, FragmentIndex
from breadbox_adapters.minestudio.ray_actors import RayActorClass
from breadbox_adapters.minestudio.records import log_to_minestudio


def get_last_fragment_indexes(fragment_indexs: Sequence[FragmentIndex]) -> list[FragmentIndex]:
    """Those whose successor, the same worker's next fragment, is not among them; latest first."""
    following: dict[str, int] = {}
    last = []
    for index in _latest_first(fragment_indexs):
        if following.get(index.worker_uuid) != index.fid_in_worker + 1:
            last.append(index)
        following[index.worker_uuid] = index.fid_in_worker
    return last


def _latest_first(indexes: Sequence[FragmentIndex]) -> list[FragmentIndex]:
    return sorted(indexes, key=lambda index: index.fid_in_worker)[::-1]


class GAEWorker(RayActorClass):
    """Advantages and value targets of a batch whose ranks each know a part. Not thread-safe.

    `GAEWorker(...)` is an object of this process; `GAEWorker.remote(...)` a Ray actor, as in
    MineStudio.
    """

    def __init__(self, discount: float, gae_lambda: float) -> None:
        """Reckon with these.

        Args:
            discount: Gamma, per step.
            gae_lambda: 0: one step ahead; 1: to the end of what is known.
        """
        self.discount = discount
        self.gae_lambda = gae_lambda
        self.td_targets = FragmentDataDict()
        self.advantages = FragmentDataDict()
        self.reset()

    def reset(self) -> None:
        """Forget what the ranks told."""
        self.gae_infos: dict[FragmentIndex, dict[str, Any]] = {}

    def update_gae_infos(self, gae_infos: Mapping[FragmentIndex, Mapping[str, Any]]) -> None:
        """Take what a rank knows.

        Args:
            gae_infos: By fragment: `reward` and `vpred`, float[T]; `next_done`, bool[T]; and
                `next_vpred`, the value after its last step, of those that
                `get_last_fragment_indexes` names.
        """
        self.gae_infos.update({index: dict(info) for index, info in gae_infos.items()})

    def calculate_target(self) -> None:
        """Reckon `advantages` and `td_targets`, float[T] by fragment, of all that was told.

        Fragments that follow each other are one run; a run begins with `next_vpred` behind it.
        The mean length of the runs goes to MineStudio's log as `GAEWorker/average_gae_length`.

        Raises:
            KeyError: A fragment that nothing follows has no `next_vpred`.
            FloatingPointError: A value or reward is not a number; names the fragment.
        """
        self.td_targets, self.advantages = FragmentDataDict(), FragmentDataDict()
        following: dict[str, int] = {}
        carried: dict[str, tuple[float, float]] = {}
        run_lengths: dict[str, list[int]] = {}
        for index in _latest_first(list(self.gae_infos)):
            worker, info = index.worker_uuid, self.gae_infos[index]
            if following.get(worker) != index.fid_in_worker + 1:
                carried[worker] = (0.0, info["next_vpred"])
                run_lengths.setdefault(worker, []).append(0)
            following[worker] = index.fid_in_worker
            carried[worker] = self._reckon(index, info, *carried[worker])
            run_lengths[worker][-1] += len(info["next_done"])
        lengths = [length for of_worker in run_lengths.values() for length in of_worker]
        if lengths:
            log_to_minestudio({"GAEWorker/average_gae_length": np.mean(lengths)})

    def _reckon(
        self, index: FragmentIndex, info: Mapping[str, Any], advantage: float, next_value: float
    ) -> tuple[float, float]:
        """Reckon one fragment, given what follows it; returns what the one before is given."""
        values, rewards, dones = info["vpred"], info["reward"], info["next_done"]
        advantages, targets = np.zeros_like(values), np.zeros_like(values)
        for t in reversed(range(len(dones))):
            goes_on = 1.0 - dones[t]
            error = rewards[t] + self.discount * next_value * goes_on - values[t]
            advantage = error + self.discount * self.gae_lambda * goes_on * advantage
            advantages[t], targets[t] = advantage, advantage + values[t]
            next_value = values[t]
        if np.isnan(targets).any():
            raise FloatingPointError(f"a value or reward of {index}, or after it, is not a number")
        self.advantages[index], self.td_targets[index] = advantages, targets
        return advantage, next_value

    def get_target(
        self, indexs: Sequence[FragmentIndex]
    ) -> tuple[FragmentDataDict, FragmentDataDict]:
        """Value targets and advantages of some fragments.

        Raises:
            KeyError: One of them was not among those told.
        """
        return (
            FragmentDataDict({index: self.td_targets[index] for index in indexs}),
            FragmentDataDict({index: self.advantages[index] for index in indexs}),
        )
