"""Classic control, many environments at a time: the equations of Gymnasium's, over whole arrays.

States are float64 [N, K] where Gymnasium keeps some in float32, so the two agree to float32's
precision; a test walks both side by side.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Stepped = tuple[Array, Array, NDArray[np.bool_]]
"""States after a step [N, K], rewards [N], whether the episode terminated [N]."""


@dataclass(frozen=True, slots=True)
class BatchedEnv:
    """How environments of one kind begin, go on, and look."""

    observation_space: "gymnasium.Space[Any]"
    action_space: "gymnasium.Space[Any]"
    steps_max: int
    """An episode is truncated after as many."""
    reset_high: tuple[float, ...]
    """States begin uniformly within plus and minus these."""
    step: Callable[[Array, NDArray[np.generic]], Stepped]
    """From states [N, K] and actions [N, ...]."""
    observe: Callable[[Array], NDArray[np.float32]]
    """Observations [N, D] of states."""

    def reset(self, rng: np.random.Generator, count: int) -> Array:
        """Draw *count* states to begin with, float64[count, K]."""
        high = np.array(self.reset_high)
        return rng.uniform(-high, high, size=(count, len(high)))


def _push_cart(state: Array, force: Array) -> Stepped:
    x_dot, theta, theta_dot = state.T[1:]
    cosine, sine = np.cos(theta), np.sin(theta)
    temp = (force + 0.05 * theta_dot**2 * sine) / 1.1
    theta_acc = (9.8 * sine - cosine * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cosine / 1.1
    after = state + 0.02 * np.stack([x_dot, x_acc, theta_dot, theta_acc], 1)
    terminated = (np.abs(after[:, 0]) > 2.4) | (np.abs(after[:, 2]) > 12 * 2 * math.pi / 360)
    return after, np.ones(len(state)), terminated


def _step_cartpole(state: Array, action: NDArray[np.generic]) -> Stepped:
    return _push_cart(state, np.where(action == 1, 10.0, -10.0))


def _step_pendulum(state: Array, action: NDArray[np.generic]) -> Stepped:
    theta, rate = state.T
    torque = np.clip(np.asarray(action, np.float64)[:, 0], -2.0, 2.0)
    angle = (theta + math.pi) % (2 * math.pi) - math.pi
    cost = angle**2 + 0.1 * rate**2 + 0.001 * torque**2
    after = np.clip(rate + 0.05 * (15.0 * np.sin(theta) + 3.0 * torque), -8.0, 8.0)
    return np.stack([theta + 0.05 * after, after], 1), -cost, np.zeros(len(state), dtype=np.bool_)


def _observe_pendulum(state: Array) -> NDArray[np.float32]:
    theta, rate = state.T
    return np.stack([np.cos(theta), np.sin(theta), rate], 1).astype(np.float32)


_LCG = 2.0**22
"""Modulus of the generator that symbols come from: its products are exact in float64."""
_SYMBOLS = 3


def _symbols(state: Array) -> NDArray[np.int64]:
    """Symbols from numbers below `_LCG`, or from -`_LCG` where an episode begins."""
    return (np.abs(state) * _SYMBOLS / _LCG).astype(np.int64)


def _step_recall(state: Array, action: NDArray[np.generic]) -> Stepped:
    reward = (_symbols(state[:, -1]) == action).astype(np.float64)
    newest = (np.floor(np.abs(state[:, :1])) * 1_140_671_485 + 12_820_163) % _LCG
    return (
        np.concatenate([newest, state[:, :-1]], 1),
        reward,
        np.zeros(len(state), dtype=np.bool_),
    )


def _observe_recall(state: Array) -> NDArray[np.float32]:
    return np.eye(_SYMBOLS, dtype=np.float32)[_symbols(state[:, 0])]


def _acrobot_rates(state: Array, torque: Array) -> Array:
    """Time derivative of the states, all masses and lengths 1, centres of mass at half."""
    theta1, theta2, rate1, rate2 = state.T
    cosine2, sine2 = np.cos(theta2), np.sin(theta2)
    d1 = 0.25 + (1.25 + cosine2) + 2.0
    d2 = 0.25 + 0.5 * cosine2 + 1.0
    phi2 = 4.9 * np.cos(theta1 + theta2 - math.pi / 2)
    phi1 = -0.5 * rate2**2 * sine2 - rate2 * rate1 * sine2
    phi1 += 14.7 * np.cos(theta1 - math.pi / 2) + phi2
    acc2 = torque + d2 / d1 * phi1 - 0.5 * rate1**2 * sine2 - phi2
    acc2 /= 1.25 - d2**2 / d1
    return np.stack([rate1, rate2, -(d2 * acc2 + phi1) / d1, acc2], 1)


def _step_acrobot(state: Array, action: NDArray[np.generic]) -> Stepped:
    torque = np.asarray(action, dtype=np.float64) - 1.0
    k1 = _acrobot_rates(state, torque)
    k2 = _acrobot_rates(state + 0.1 * k1, torque)
    k3 = _acrobot_rates(state + 0.1 * k2, torque)
    k4 = _acrobot_rates(state + 0.2 * k3, torque)
    after = state + 0.2 / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
    after[:, :2] = (after[:, :2] + math.pi) % (2 * math.pi) - math.pi
    limits = np.array([4 * math.pi, 9 * math.pi])
    after[:, 2:] = np.clip(after[:, 2:], -limits, limits)
    terminated = -np.cos(after[:, 0]) - np.cos(after[:, 1] + after[:, 0]) > 1.0
    return after, np.where(terminated, 0.0, -1.0), terminated


def _observe_acrobot(state: Array) -> NDArray[np.float32]:
    angles = state[:, :2]
    seen = np.stack([np.cos(angles), np.sin(angles)], 2).reshape(-1, 4)
    return np.concatenate([seen, state[:, 2:]], 1).astype(np.float32)


def _same(state: Array) -> NDArray[np.float32]:
    return state.astype(np.float32)


_CARTPOLE = gymnasium.spaces.Box(-math.inf, math.inf, (4,))
CARTPOLE = BatchedEnv(
    _CARTPOLE, gymnasium.spaces.Discrete(2), 500, (0.05,) * 4, _step_cartpole, _same
)
ACROBOT = BatchedEnv(
    gymnasium.spaces.Box(-math.inf, math.inf, (6,)),
    gymnasium.spaces.Discrete(3),
    500,
    (0.1,) * 4,
    _step_acrobot,
    _observe_acrobot,
)
PENDULUM = BatchedEnv(
    gymnasium.spaces.Box(-math.inf, math.inf, (3,)),
    gymnasium.spaces.Box(-2.0, 2.0, (1,)),
    200,
    (math.pi, 1.0),
    _step_pendulum,
    _observe_pendulum,
)
RECALL = BatchedEnv(
    gymnasium.spaces.Box(0.0, 1.0, (_SYMBOLS,)),
    gymnasium.spaces.Discrete(_SYMBOLS),
    32,
    (_LCG - 1,) * 3,
    _step_recall,
    _observe_recall,
)
"""Each step shows one of three symbols; the reward is 1 for naming the one of two steps before."""
