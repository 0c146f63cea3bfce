"""Turn observations into features: vectors through an MLP, images through convolutions."""

import math
from collections.abc import Iterable, Sequence

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import child_path, in_order
from breadbox_policies.normalizing import ObservationNormalizer
from breadbox_policies.protocol import Tree

_CONVOLUTIONS = ((16, 8, 4), (32, 4, 2), (32, 3, 1))
"""(channels, kernel, stride) of the classic network for 84x84 frames, with fewer channels."""
_PICTURE_SIDE_MIN = 16


def initialise(layer: nn.Linear | nn.Conv2d, gain: float = math.sqrt(2)) -> nn.Module:
    """Make *layer* orthogonal with zero bias, so that PPO's first updates are small."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(input_count: int, hidden_sizes: Sequence[int], output_count: int, gain: float) -> nn.Module:
    """Build a tanh network with a linear last layer of the given *gain*."""
    layers: list[nn.Module] = []
    width = input_count
    for size in hidden_sizes:
        layers += [initialise(nn.Linear(width, size)), nn.Tanh()]
        width = size
    layers.append(initialise(nn.Linear(width, output_count), gain))
    return nn.Sequential(*layers)


class VectorFlattener(nn.Module):
    """Concatenate an observation's leaves, [..., n]; discrete parts are one-hot.

    With a clip range the numbers are normalized by their running mean and deviation.
    """

    def __init__(self, space: "gymnasium.Space[object]", clip: float | None = None) -> None:
        super().__init__()
        self._space = space
        is_number = _are_numbers(space, "")
        self.output_count = len(is_number)
        self._normalizer = None if clip is None else ObservationNormalizer(is_number, clip)

    def update_statistics(self, obs: Tree) -> None:
        """Count observations [..., *space], if they are normalized."""
        if self._normalizer is not None:
            self._normalizer.add(self._flat(obs))

    def forward(self, obs: Tree) -> Tensor:
        """Return float32[..., output_count]."""
        flat = self._flat(obs)
        return flat if self._normalizer is None else self._normalizer(flat)

    def _flat(self, obs: Tree) -> Tensor:
        parts: list[Tensor] = []
        _flatten(self._space, obs, parts)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _are_numbers(space: "gymnasium.Space[object]", path: str) -> list[bool]:
    """Return for each flat entry whether it is a number, and not one of some choices."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return [False] * int(space.n)
    if is_picture(space):
        where = f" at {path}" if path else ""
        how = "" if space.dtype == "uint8" else "as uint8, from 0 to 255, "
        raise InvalidRequestError(
            "observation_space",
            f"holds an image{where}, {space}, that would be flattened into one vector; use the "
            f"policy 'conv_lstm', which wants images {how}on their own or as entries of a dict",
        )
    if isinstance(
        space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary | gymnasium.spaces.MultiDiscrete
    ):
        is_number = not isinstance(space, gymnasium.spaces.MultiBinary)
        return [is_number] * math.prod(space.shape)
    parts: Iterable[tuple[str | int, gymnasium.Space[object]]]
    if isinstance(space, gymnasium.spaces.Dict):
        parts = in_order(space.spaces)
    elif isinstance(space, gymnasium.spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        where = f" at {path}" if path else ""
        raise InvalidRequestError("observation_space", f"cannot be flattened: {space}{where}")
    return [each for key, part in parts for each in _are_numbers(part, child_path(path, key))]


def _flatten(space: "gymnasium.Space[object]", obs: Tree, into: list[Tensor]) -> None:
    if isinstance(space, gymnasium.spaces.Discrete):
        index = obs.long() - int(space.start)
        into.append(nn.functional.one_hot(index, int(space.n)).float())
    elif isinstance(space, gymnasium.spaces.Dict):
        for key, part in in_order(space.spaces):  # Weights are of one order of the keys.
            _flatten(part, obs[key], into)
    elif isinstance(space, gymnasium.spaces.Tuple):
        for part, value in zip(space.spaces, obs, strict=True):
            _flatten(part, value, into)
    else:
        assert space.shape is not None
        leading = obs.shape[: obs.dim() - len(space.shape)]
        into.append(obs.reshape(*leading, -1).float())


def image_layout(space: "gymnasium.Space[object]") -> str | None:
    """Return "HW", "HWC" or "CHW" for a uint8 space of images, at most 16 deep, else None."""
    return _layout_of(space) if space.dtype == "uint8" else None


def _layout_of(space: "gymnasium.Space[object]") -> str | None:
    if not isinstance(space, gymnasium.spaces.Box):
        return None
    if len(space.shape) == 2:
        return "HW"
    if len(space.shape) != 3:
        return None
    if space.shape[2] <= min(16, *space.shape[:2]):
        return "HWC"
    return "CHW" if space.shape[0] <= 16 else None


def is_picture(space: "gymnasium.Space[object]") -> bool:
    """Return True for a space of images; floats from 0 to 1 or 255 count, small boards do not."""
    layout = _layout_of(space)
    if layout is None or not isinstance(space, gymnasium.spaces.Box):
        return False
    if space.dtype != "uint8" and not _is_brightness(space):
        return False
    height, width = space.shape[1:] if layout == "CHW" else space.shape[:2]
    return bool(min(height, width) >= _PICTURE_SIDE_MIN)


def _is_brightness(space: gymnasium.spaces.Box) -> bool:
    tops = np.unique(space.high).tolist()
    return space.dtype.kind == "f" and not space.low.any() and tops in ([1.0], [255.0])


def has_picture(space: "gymnasium.Space[object]") -> bool:
    """Return True if a space is, or a dict contains, pictures that `ImageEncoder` takes."""
    return any(is_picture(part) for part, _ in image_parts(space).values())


class ImageEncoder(nn.Module):
    """Convolutions over uint8 images of any layout, then one linear layer."""

    def __init__(self, space: gymnasium.spaces.Box, layout: str, output_count: int) -> None:
        super().__init__()
        self._layout = layout
        self._space_axes = len(space.shape)
        height, width, channels = {
            "HW": (space.shape[0], space.shape[1], 1),
            "HWC": space.shape[-3:],
            "CHW": (space.shape[-2], space.shape[-1], space.shape[0]),
        }[layout]
        layers: list[nn.Module] = []
        for out_channels, kernel, stride in _CONVOLUTIONS:
            # Small images get smaller kernels instead of being refused.
            kernel = min(kernel, height, width)
            stride = min(stride, kernel)
            layers += [initialise(nn.Conv2d(channels, out_channels, kernel, stride)), nn.ReLU()]
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            channels = out_channels
        layers += [nn.Flatten(), initialise(nn.Linear(channels * height * width, output_count))]
        self.network = nn.Sequential(*layers, nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        """Return float32[..., output_count] for uint8[..., *image]."""
        leading = image.shape[: image.dim() - self._space_axes]
        flat = image.reshape(-1, *image.shape[image.dim() - self._space_axes :])
        if self._layout == "HW":
            flat = flat.unsqueeze(1)
        elif self._layout == "HWC":
            flat = flat.permute(0, 3, 1, 2)
        features: Tensor = self.network(flat.float().div_(255.0))
        return features.reshape(*leading, features.shape[-1])


class ObservationEncoder(nn.Module):
    """Join images through convolutions, and all else through one linear layer."""

    def __init__(
        self, space: "gymnasium.Space[object]", feature_count: int, clip: float | None = None
    ) -> None:
        super().__init__()
        images = image_parts(space)
        self._image_keys = list(images)
        self._image_encoders = nn.ModuleList(
            ImageEncoder(part, layout, feature_count) for part, layout in images.values()
        )
        rest = _without_images(space)
        self._flattener = VectorFlattener(rest, clip) if rest is not None else None
        self._linear = (
            nn.Sequential(
                initialise(nn.Linear(self._flattener.output_count, feature_count)), nn.Tanh()
            )
            if self._flattener is not None
            else None
        )
        self.output_count = feature_count * (len(images) + (rest is not None))

    def forward(self, obs: Tree) -> Tensor:
        """Return float32[..., output_count]."""
        parts = [
            encoder(obs[key] if key is not None else obs)
            for key, encoder in zip(self._image_keys, self._image_encoders, strict=True)
        ]
        if self._flattener is not None and self._linear is not None:
            parts.append(self._linear(self._flattener(obs)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def image_parts(
    space: "gymnasium.Space[object]",
) -> dict[str | None, tuple[gymnasium.spaces.Box, str]]:
    """Return the images of a space with their layouts, by key of a dict; that of None is alone."""
    parts = in_order(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else [(None, space)]
    return {
        key: (part, layout)
        for key, part in parts
        if (layout := image_layout(part)) and isinstance(part, gymnasium.spaces.Box)
    }


def _without_images(space: "gymnasium.Space[object]") -> "gymnasium.Space[object] | None":
    if image_layout(space) is not None:
        return None
    if not isinstance(space, gymnasium.spaces.Dict):
        return space
    rest = {key: part for key, part in space.items() if image_layout(part) is None}
    return gymnasium.spaces.Dict(rest) if rest else None
