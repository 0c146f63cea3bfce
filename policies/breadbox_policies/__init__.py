"""Torch policies, the same networks for workers and learners; importing this imports torch."""

from breadbox_policies.networks import make_policy as make_policy
from breadbox_policies.networks import policy_names as policy_names
from breadbox_policies.normalizing import RunningMoments as RunningMoments
from breadbox_policies.protocol import ActResult as ActResult
from breadbox_policies.protocol import Evaluation as Evaluation
from breadbox_policies.protocol import Policy as Policy
from breadbox_policies.protocol import PolicyModule as PolicyModule
from breadbox_policies.protocol import State as State
from breadbox_policies.protocol import WeightsMismatchError as WeightsMismatchError
from breadbox_policies.protocol import check_greedy as check_greedy
from breadbox_policies.protocol import policy_weights as policy_weights
from breadbox_policies.protocol import set_policy_weights as set_policy_weights
from breadbox_policies.protocol import takes as takes
from breadbox_policies.repeatable import NotRepeatableError as NotRepeatableError
from breadbox_policies.repeatable import compute_repeatably as compute_repeatably
