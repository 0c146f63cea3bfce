"""Running mean and variance of what a learner has seen, as buffers that travel with the weights."""

import torch
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError

EPSILON = 1e-8


class RunningMoments(nn.Module):
    """Mean and variance of N numbers over all that was counted; at first 0 and 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        # Wide, because a count in float32 stops growing at 2^24.
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.count: Tensor
        self.mean: Tensor
        self.variance: Tensor

    @torch.no_grad()
    def add(self, numbers: Tensor) -> None:
        """Count numbers [..., N]; rows that are not finite are left out.

        Merges by the pairwise formula of Chan, Golub and LeVeque, "Updating formulae and a pairwise
        algorithm for computing sample variances", Stanford CS-TR-79-773, 1979.
        """
        rows = numbers.reshape(-1, len(self.mean)).to(self.mean)
        rows = rows[rows.isfinite().all(-1)]
        if not len(rows):
            return
        share = len(rows) / (self.count + len(rows))
        away = rows.mean(0) - self.mean
        spread = rows.var(0, correction=0) - self.variance
        # In place: a state_dict holds these very tensors.
        self.variance += share * spread + share * (1.0 - share) * away.square()
        self.mean += share * away
        self.count += len(rows)

    @property
    def deviation(self) -> Tensor:
        """float64[N]; never 0."""
        return (self.variance + EPSILON).sqrt()


class ObservationNormalizer(RunningMoments):
    """Shift and scale numbers to mean 0 and deviation 1, and clip them."""

    def __init__(self, is_number: list[bool], clip: float) -> None:
        """Leave those that `is_number` denies, such as one-hot choices, as they are."""
        if not clip > 0:
            raise InvalidRequestError("policy_options", f"observation_clip is {clip}, not over 0")
        super().__init__(len(is_number))
        self._clip = clip
        self.register_buffer("_is_number", torch.tensor(is_number), persistent=False)
        self._is_number: Tensor

    def forward(self, numbers: Tensor) -> Tensor:
        """Return float32[..., N]."""
        normalized = (numbers - self.mean.float()) / self.deviation.float()
        return torch.where(self._is_number, normalized.clamp(-self._clip, self._clip), numbers)
