"""Sums of two-digit numbers as tokens, and a transformer of 0.1 million parameters for them.

"47+85=" is answered with "231.": the digits of 132 from the last to the first, and the end.
"""

import random

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, scaled_dot_product_attention

VOCABULARY = {character: number for number, character in enumerate("0123456789+=.")}
END, PROMPT_LENGTH, ANSWER_MAX = VOCABULARY["."], 6, 4
WIDTH, HEADS, LAYERS = 64, 4, 2
SUMS = [(first, second) for first in range(100) for second in range(100)]
random.Random(0).shuffle(SUMS)
HELD_OUT, SHOWN, NEW = SUMS[:500], SUMS[500:1_500], SUMS[1_500:]
"""Sums that are never trained on, those that the warm-up shows, and those of the questions."""


def prompt(first: int, second: int) -> list[int]:
    return [VOCABULARY[each] for each in f"{first:02}+{second:02}="]


def answer(first: int, second: int) -> list[int]:
    return [VOCABULARY[each] for each in f"{str(first + second)[::-1]}."]


def reward_of(ids: list[int]) -> float:
    """1 if the prompt is followed by its right answer, and by nothing else."""
    tens, ones, _, more_tens, more_ones, _, *answered = ids
    return float(answered == answer(10 * tens + ones, 10 * more_tens + more_ones))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.alone = nn.Sequential(*wide)

    def forward(self, hidden: Tensor, row: Tensor, position: Tensor) -> Tensor:
        # On a GPU flash_attn_varlen_func takes packed sequences; here each gets a row of its own.
        packed = self.queries_keys_values(self.before(hidden))
        shape = int(row[-1]) + 1, int(position.max()) + 1
        rows = packed.new_zeros(*shape, 3 * WIDTH).index_put((row, position), packed)
        split = rows.view(*shape, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*split, is_causal=True)
        seen = seen.transpose(1, 2).reshape(*shape, WIDTH)[row, position]
        hidden = hidden + self.mixed(seen)
        return hidden + self.alone(self.between(hidden))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(VOCABULARY), WIDTH)
        self.position = nn.Embedding(PROMPT_LENGTH + ANSWER_MAX, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """Log-probabilities [total, 13] of what follows each token of packed sequences [total]."""
        hidden, row = self.token(ids) + self.position(position), (position == 0).cumsum(0) - 1
        for layer in self.layers:
            hidden = layer(hidden, row, position)
        return self.logits(self.last(hidden)).log_softmax(-1)

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], greedy: bool = False) -> tuple[Tensor, Tensor]:
        """Ids and their log-probabilities [N, 10]: prompts, answers, and ends behind these.

        The log-probabilities of a prompt are 0.
        """
        ids = torch.tensor(prompts)
        log_prob = torch.zeros(ids.shape)
        for length in range(PROMPT_LENGTH, PROMPT_LENGTH + ANSWER_MAX):
            position = torch.arange(length).repeat(len(ids))
            following = self(ids.flatten(), position).view(len(ids), length, -1)[:, -1]
            drawn = following.exp().multinomial(1)
            drawn = following.argmax(-1, keepdim=True) if greedy else drawn
            drawn[ids[:, -1] == END] = END
            ids = torch.cat([ids, drawn], 1)
            log_prob = torch.cat([log_prob, following.gather(1, drawn)], 1)
        return ids, log_prob

    def accuracy(self, sums: list[tuple[int, int]] = HELD_OUT) -> float:
        """The share of sums that the likeliest tokens answer rightly."""
        ids, _ = self.complete([prompt(*each) for each in sums], greedy=True)
        return sum(reward_of(each) for each in map(without_padding, ids)) / len(sums)


def without_padding(ids: Tensor) -> list[int]:
    """A prompt and its answer up to the first end, from a row of `complete`."""
    numbers = ids.tolist()
    length = numbers.index(END) + 1 if END in numbers else len(numbers)
    return numbers[:length]


def warm_up(model: Transformer, seed: int) -> None:
    """Show answers until a few are right, since rewards need some: then they take over."""
    optimizer, rng = torch.optim.Adam(model.parameters(), lr=1e-3), random.Random(seed)
    while model.accuracy(NEW[:500]) < 0.3:
        for _ in range(25):
            rows = [prompt(*each) + answer(*each) for each in rng.choices(SHOWN, k=64)]
            ids = torch.tensor([number for row in rows for number in row])
            position = torch.tensor([place for row in rows for place in range(len(row))])
            answers = position[1:] >= PROMPT_LENGTH
            loss = nll_loss(model(ids, position)[:-1][answers], ids[1:][answers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
