import torch


class MeanMetric:
    def __init__(self):
        self._total, self._weight = 0.0, 0.0

    def to(self, device):
        return self

    def update(self, value, weight=1.0):
        self._total += float(torch.as_tensor(value, dtype=torch.float64).mean()) * weight
        self._weight += weight

    def compute(self):
        return torch.tensor(self._total / self._weight if self._weight else float("nan"))

    def reset(self):
        self._total, self._weight = 0.0, 0.0


class ExplainedVariance(MeanMetric):
    def update(self, predicted, wanted):
        super().update(((wanted - predicted) ** 2).mean())
