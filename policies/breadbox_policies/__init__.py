"""Torch policies, the same networks for workers and learners; importing this imports torch."""

from breadbox_policies.networks import make_policy, policy_names
from breadbox_policies.normalizing import RunningMoments
from breadbox_policies.protocol import (
    ActResult,
    Evaluation,
    Policy,
    PolicyModule,
    State,
    WeightsMismatchError,
    check_greedy,
    policy_weights,
    set_policy_weights,
)
from breadbox_policies.repeatable import NotRepeatableError, compute_repeatably

__all__ = [
    "ActResult",
    "Evaluation",
    "NotRepeatableError",
    "Policy",
    "PolicyModule",
    "RunningMoments",
    "State",
    "WeightsMismatchError",
    "check_greedy",
    "compute_repeatably",
    "make_policy",
    "policy_names",
    "policy_weights",
    "set_policy_weights",
]
