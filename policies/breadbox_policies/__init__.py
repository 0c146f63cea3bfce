"""Torch policies that rollout workers act with and learners train: the same networks on both sides.

`make_policy` builds one by name from the spaces of an environment. Importing this package imports
torch; the rest of the library does not need it.
"""

from breadbox_policies.networks import make_policy, policy_names
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

__all__ = [
    "ActResult",
    "Evaluation",
    "Policy",
    "PolicyModule",
    "State",
    "WeightsMismatchError",
    "check_greedy",
    "make_policy",
    "policy_names",
    "policy_weights",
    "set_policy_weights",
]
