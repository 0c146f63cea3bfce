"""Estimate advantages over a batch of fragments: generalised, or V-trace for older data.

Invariants:
  A1  delta[t] = reward[t] + discount * V'(t) * (1 - terminated[t]) - value[t], where V'(t) is the
      value of the true successor of step t, never of the next episode's first observation.
  A2  The recursion stops at every episode end, whether it terminated or was truncated.
  A3  Fragments of one worker and session with consecutive indices chain within the batch, at
      whatever positions; one marked as a discontinuity does not chain to the one before.
  A4  The last fragment of each run bootstraps from the value of its `next_obs`.
  A5  Sums are kept in float64 and stored as float32.

V-trace is that of L. Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance
Weighted Actor-Learner Architectures" (2018), section 4.1, with the lambda of its remark 2. For data
of policy mu, judged by policy pi, with ratio[t] = pi(a[t]) / mu(a[t]):

    rho[t] = min(rho_max, ratio[t])            c[t] = lambda * min(c_max, ratio[t])
    target[t] = value[t] + rho[t] * delta[t] + discount * c[t] * (target[t+1] - value[t+1])
    advantage[t] = delta[t] + discount * lambda * (target[t+1] - value[t+1])

With lambda 1 this is the paper's advantage. A2 to A4 hold for it too: after the end of an episode
the target is the successor's value, and the difference after it is 0. With a ratio of 1 everywhere,
and limits of at least 1, both equal those of generalised advantage estimation. The advantage does
not contain the weight of its own step, rho[t]: a learner multiplies the gradient of the policy by
it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import torch

NO_SUCCESSOR = -1
"""Entry in an array of successors: no fragment of the batch follows this one."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages and value targets of a batch."""

    advantage: NDArray[np.float32]
    """float32[B, T]."""
    target: NDArray[np.float32]
    """float32[B, T]; target of the value function: advantage + value. With V-trace, the target of
    the paper, which also weighs the step's own temporal difference."""


@dataclass(frozen=True, slots=True)
class VTrace:
    """Correction of data from an older policy; see the module's docstring."""

    ratio: ArrayLike
    """float[B, T]; probability of each action under the judged policy, divided by that under the
    policy that acted, or 1 if the latter is unknown."""
    rho_max: float = 1.0
    """Bound of the weight of each step's own temporal difference: decides what the targets converge
    to."""
    c_max: float = 1.0
    """Bound of the weight of later temporal differences: decides how fast the targets converge."""


def find_successors(
    worker_ids: Sequence[Hashable],
    fragment_indices: Sequence[int],
    *,
    discontinuities: Sequence[bool] | None = None,
    session_ids: Sequence[Hashable] | None = None,
) -> NDArray[np.intp]:
    """Find, for each fragment of a batch, the one that continues it.

    Args:
        worker_ids: One per fragment, in any order.
        fragment_indices: Index of each fragment in its worker's sequence.
        discontinuities: True where steps were dropped before the fragment, or None for nowhere.
        session_ids: Session of each fragment, or None if all are of one session.

    Returns:
        intp[B]; position in the batch of the next fragment of the same worker and session, or
        `NO_SUCCESSOR`. Both copies of a fragment that occurs twice have the same successor.

    Raises:
        ValueError: The arguments differ in length.
    """
    sessions: Sequence[Hashable] = [""] * len(worker_ids) if session_ids is None else session_ids
    breaks: Sequence[bool] = (
        [False] * len(worker_ids) if discontinuities is None else discontinuities
    )
    if not len(worker_ids) == len(fragment_indices) == len(sessions) == len(breaks):
        raise ValueError(
            "worker_ids, fragment_indices, discontinuities and session_ids differ in length"
        )
    position_of = {
        (session, worker, int(index)): position
        for position, (session, worker, index, is_break) in enumerate(
            zip(sessions, worker_ids, fragment_indices, breaks, strict=True)
        )
        if not is_break
    }
    return np.array(
        [
            position_of.get((session, worker, int(index) + 1), NO_SUCCESSOR)
            for session, worker, index in zip(sessions, worker_ids, fragment_indices, strict=True)
        ],
        dtype=np.intp,
    )


def estimate_advantages(
    *,
    value: ArrayLike,
    reward: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike | None = None,
    next_value: ArrayLike,
    final_value: ArrayLike | None = None,
    successor: ArrayLike | None = None,
    step_count: ArrayLike | None = None,
    discount: float,
    gae_lambda: float,
    correction: VTrace | None = None,
) -> Advantages:
    """Estimate advantages and value targets for a batch of fragments.

    Computes all fragments together, from the last step to the first; chained fragments take as
    many passes as the longest chain has fragments.

    Args:
        value: float[B, T]; value of each step's observation.
        reward: float[B, T].
        terminated: bool[B, T]; the episode ended in a terminal state, without a future.
        truncated: bool[B, T]; the episode was cut off before its end; or None for nowhere. A step
            that is both counts as terminated.
        next_value: float[B]; value of `next_obs`. Only read if no fragment of the batch follows and
            the last step did not end an episode; NaN is allowed elsewhere.
        final_value: float[B, T]; value of the true final observation where an episode was
            truncated, NaN if unknown; or None if all are unknown. The step's own value replaces an
            unknown one, because a time limit must not look like a terminal state of value zero.
        successor: int[B]; as `find_successors` returns it, or None if no fragments chain.
        step_count: int[B]; valid steps of each fragment, 1 to T, if shorter ones are padded at the
            end, or None if all have T.
        discount: gamma, 0 to 1.
        gae_lambda: lambda, 0 to 1.
        correction: Correction by V-trace, or None for generalised advantage estimation.

    Returns:
        Advantages and targets; 0 in padding.

    Raises:
        ValueError: Shapes disagree, discount or lambda is out of range, a `next_value` that is
            needed is not a number (the message names the position), or successors form a circle.
    """
    steps = _Steps.check(value, reward, terminated, truncated, final_value, step_count)
    batch_size = len(steps.value)
    bootstrap = np.asarray(next_value, dtype=np.float64)
    follows = (
        np.full(batch_size, NO_SUCCESSOR, dtype=np.intp)
        if successor is None
        else np.asarray(successor, dtype=np.intp)
    )
    if bootstrap.shape != (batch_size,) or follows.shape != (batch_size,):
        raise ValueError(f"next_value and successor must have shape [{batch_size}]")
    for name, number in (("discount", discount), ("gae_lambda", gae_lambda)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must be between 0 and 1, got {number}")
    _check_bootstrap(steps, bootstrap, follows)
    rho, trace = _weights(steps, correction)

    advantage = np.zeros_like(steps.value)
    ahead = np.zeros_like(steps.value)
    for rows in _passes(follows):
        chained = follows[rows] >= 0
        before = np.where(chained, follows[rows], 0)
        # Row 0 of the following fragment is final: the pass before computed it.
        carry = np.where(chained, advantage[before, 0], 0.0)
        after = np.where(chained, steps.value[before, 0], bootstrap[rows])
        _sweep(
            steps,
            rows,
            (advantage, ahead),
            carry,
            after,
            weights=(rho[rows], trace[rows]),
            decay=(discount, discount * gae_lambda),
        )
    target = np.where(steps.valid, advantage + steps.value, 0.0)
    returned = advantage if correction is None else ahead
    return Advantages(returned.astype(np.float32), target.astype(np.float32))


def estimate_advantages_torch(
    *,
    value: "torch.Tensor",
    reward: "torch.Tensor",
    terminated: "torch.Tensor",
    next_value: "torch.Tensor",
    truncated: "torch.Tensor | None" = None,
    final_value: "torch.Tensor | None" = None,
    successor: ArrayLike | None = None,
    step_count: ArrayLike | None = None,
    discount: float,
    gae_lambda: float,
    correction: VTrace | None = None,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Estimate as `estimate_advantages` does, for tensors on any device.

    The scalars ([B, T], some kilobytes) are computed on the host: float64 is slow or absent on
    accelerators, and launching each tiny operation of the recursion would dominate. Blocks until
    the device has produced the inputs.

    Returns:
        Advantage and target, float32[B, T], on the device of *value*, without gradient.
    """
    import torch

    def host(tensor: "torch.Tensor | None") -> Any:
        return None if tensor is None else tensor.detach().cpu().numpy()

    estimated = estimate_advantages(
        value=host(value.float()),
        reward=host(reward.float()),
        terminated=host(terminated),
        truncated=host(truncated),
        next_value=host(next_value.float()),
        final_value=None if final_value is None else host(final_value.float()),
        successor=successor,
        step_count=step_count,
        discount=discount,
        gae_lambda=gae_lambda,
        correction=correction,
    )
    return (
        torch.from_numpy(estimated.advantage).to(value.device),
        torch.from_numpy(estimated.target).to(value.device),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    value: NDArray[np.float64]
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    end_value: NDArray[np.float64]
    """Value to bootstrap from where `ended`; 0 where terminated."""
    valid: NDArray[np.bool_]

    @classmethod
    def check(
        cls,
        value: ArrayLike,
        reward: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike | None,
        final_value: ArrayLike | None,
        step_count: ArrayLike | None,
    ) -> "_Steps":
        values = np.asarray(value, dtype=np.float64)
        if values.ndim != 2:
            raise ValueError(f"value must have shape [B, T], got {list(values.shape)}")
        rewards = np.asarray(reward, dtype=np.float64)
        terminal = np.asarray(terminated, dtype=np.bool_)
        cut = (
            np.zeros_like(terminal) if truncated is None else np.asarray(truncated, dtype=np.bool_)
        )
        final = (
            np.full_like(values, np.nan)
            if final_value is None
            else np.asarray(final_value, dtype=np.float64)
        )
        named = {"reward": rewards, "terminated": terminal, "truncated": cut, "final_value": final}
        for name, array in named.items():
            if array.shape != values.shape:
                raise ValueError(
                    f"{name} must have the shape of value, {list(values.shape)}, "
                    f"got {list(array.shape)}"
                )
        end_value = np.where(np.isnan(final), values, final)
        end_value[terminal] = 0.0
        return cls(values, rewards, terminal, terminal | cut, end_value, _valid(values, step_count))


def _valid(values: NDArray[np.float64], step_count: ArrayLike | None) -> NDArray[np.bool_]:
    if step_count is None:
        return np.ones(values.shape, dtype=np.bool_)
    counts = np.asarray(step_count, dtype=np.intp)
    if counts.shape != values.shape[:1]:
        raise ValueError(f"step_count must have shape [{len(values)}]")
    if counts.size and not 1 <= int(counts.min()) <= int(counts.max()) <= values.shape[1]:
        raise ValueError(f"step_count must be between 1 and {values.shape[1]}")
    valid: NDArray[np.bool_] = np.arange(values.shape[1])[None, :] < counts[:, None]
    return valid


def _check_bootstrap(
    steps: _Steps, bootstrap: NDArray[np.float64], follows: NDArray[np.intp]
) -> None:
    last = steps.valid.sum(axis=1) - 1
    ended_last = steps.ended[np.arange(len(last)), last]
    missing = np.flatnonzero(np.isnan(bootstrap) & (follows < 0) & ~ended_last)
    if missing.size:
        raise ValueError(
            f"next_value[{missing[0]}] is not a number, and nothing in the batch continues "
            "that fragment"
        )


def _weights(
    steps: _Steps, correction: VTrace | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights of own and later differences; float64[B, T], 1 for GAE."""
    if correction is None:
        return np.ones_like(steps.value), np.ones_like(steps.value)
    ratio = np.asarray(correction.ratio, dtype=np.float64)
    if ratio.shape != steps.value.shape:
        raise ValueError(
            f"ratio must have the shape of value, {list(steps.value.shape)}, "
            f"got {list(ratio.shape)}"
        )
    if not (ratio[steps.valid] >= 0).all():
        raise ValueError("ratio must not be negative, and a number")
    for name, limit in (("rho_max", correction.rho_max), ("c_max", correction.c_max)):
        if not limit > 0:
            raise ValueError(f"{name} must be over 0, got {limit}")
    return np.minimum(ratio, correction.rho_max), np.minimum(ratio, correction.c_max)


def _passes(follows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Return rows grouped by distance from their chain's end, nearest first."""
    if follows.size and not -1 <= int(follows.min()) <= int(follows.max()) < len(follows):
        raise ValueError("successor points outside the batch")
    passes: list[NDArray[np.intp]] = []
    done = np.zeros(len(follows), dtype=np.bool_)
    while not done.all():
        ready = np.flatnonzero(~done & ((follows < 0) | done[follows]))
        if not ready.size:
            raise ValueError("successors form a circle")
        passes.append(ready)
        done[ready] = True
    return passes


def _sweep(
    steps: _Steps,
    rows: NDArray[np.intp],
    written: tuple[NDArray[np.float64], NDArray[np.float64]],
    carry: NDArray[np.float64],
    after: NDArray[np.float64],
    *,
    weights: tuple[NDArray[np.float64], NDArray[np.float64]],
    decay: tuple[float, float],
) -> None:
    """Write the advantages of *rows*, from the last step to the first.

    The rows that continue these in time must be done already. *written* has target - value and
    V-trace's advantage, float64[B, T] each. *carry* (target - value) and *after* (value) belong to
    the step after each row's last, float64[R]. *weights* are those of a step's own and of later
    differences, float64[R, T]. *decay* is gamma, and gamma * lambda.
    """
    discount, carry_decay = decay
    # Time first: each step of the loop then reads whole contiguous rows.
    value, reward = steps.value[rows].T, steps.reward[rows].T
    ended, end_value = steps.ended[rows].T, steps.end_value[rows].T
    valid = steps.valid[rows].T
    own, carried = weights[0].T, weights[1].T
    padded = not valid.all()
    corrections, aheads = np.zeros((2, value.shape[0], len(rows)))
    for t in range(value.shape[0] - 1, -1, -1):
        successor_value = np.where(ended[t], end_value[t], after)
        delta = reward[t] + discount * successor_value - value[t]
        beyond = carry_decay * np.where(ended[t], 0.0, carry)
        current = own[t] * delta + carried[t] * beyond
        if padded:
            corrections[t] = np.where(valid[t], current, 0.0)
            aheads[t] = np.where(valid[t], delta + beyond, 0.0)
            carry = np.where(valid[t], current, carry)
            after = np.where(valid[t], value[t], after)
        else:
            corrections[t] = carry = current
            aheads[t] = delta + beyond
            after = value[t]
    for target, part in zip(written, (corrections, aheads), strict=True):
        target[rows] = part.T
