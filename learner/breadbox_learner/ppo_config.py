"""What can be set about PPO. Without torch, so that a command line starts fast."""

from typing import Literal

from breadbox.cli.settings import Settings, setting


class PpoConfig(Settings):
    """How to train. Defaults learn CartPole on a CPU."""

    discount: float = setting(0.99, ge=0, le=1)
    """gamma: weight of a reward one step later."""
    gae_lambda: float = setting(0.95, ge=0, le=1)
    """lambda of advantage estimation: 0 trusts the value function, 1 the rewards."""
    advantages: Literal["gae", "vtrace"] = "gae"
    """"gae", or "vtrace", which corrects targets and advantages, too, for the policy that acted;
    docs/learner-cookbook.md says what either did for old data."""
    vtrace_rho_max: float = setting(2.0, gt=0)
    """rho of V-trace: bound of the weight of each step's own surprise, in the targets of the value
    and in the gradient of the policy."""
    vtrace_c_max: float = setting(1.0, gt=0)
    """c of V-trace: bound of the weight with which later surprises are carried back; at most
    vtrace_rho_max."""
    epochs: int = setting(4, ge=1)
    """Passes over each batch."""
    minibatch_fragments: int = setting(16, ge=1)
    """Fragments per gradient step and rank; whole fragments, since a policy may be recurrent."""
    accumulation_count: int = setting(1, ge=1)
    """Parts a minibatch is worked through in, to save memory; the gradient is the same."""
    lr: float = setting(2.5e-3, gt=0)
    """Adam's step size."""
    lr_decay_updates: int = setting(0, ge=0)
    """Updates over which the step size falls linearly to a tenth; 0: it stays."""
    clip: float = setting(0.2, gt=0)
    """Bound of |ratio - 1| between trained and proximal policy."""
    value_coefficient: float = setting(0.5, ge=0)
    """Weight of the value loss."""
    value_clip: float = setting(0.0, ge=0)
    """Bound of how far a value may move in one update, in reward units; 0: none."""
    entropy_coefficient: float = setting(0.01, ge=0)
    """Weight of the entropy bonus."""
    kl_coefficient: float = setting(0.0, ge=0)
    """Weight of the divergence from a reference policy; 0: no reference policy."""
    target_kl: float = setting(0.0, ge=0)
    """Stop the passes over a batch once the mean divergence from the proximal policy is over 1.5
    times this, in nats; 0: never."""
    staleness_weight_max: float = setting(2.0, ge=0)
    """Bound of the weight that corrects the gradient of the policy for staleness, with "gae"; 0: no
    correction."""
    gradient_norm_max: float = setting(0.5, ge=0)
    """Norm to which a gradient is cut; 0: not cut."""
    amp: Literal["off", "bfloat16", "float16"] = "off"
    """Mixed precision."""
    value_warmup_updates: int = setting(0, ge=0)
    """First updates that train the value alone; the policy is neither trained nor published."""
