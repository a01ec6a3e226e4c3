"""Advantages: how much better an answer was than its group's, and the registry of their estimators.

Pure functions take `rewards` f[B] and `groups` i[B] (equal numbers are siblings: samples of one prompt) and return
float32 [B]. The arithmetic is float64, and a group whose rewards are all equal gets exact zeros, so that it gives no
gradient at all.

An *estimator* is what a run chooses by name: a function of the whole batch that returns one number a sequence (f[B])
or one a token (jagged (B, j)). Write one in a file of your own, and name it FILE.py:NAME:

    def above_the_mean(rewards, groups, scale: float = 1.0):
        return scale * dr_grpo(rewards, groups)

Its parameters are `rewards` f[B], `groups` i[B], `response_length` i[B] or `batch`, as many as it needs, by these
names; others are options. `register_estimator` gives one a name, and says more of it:

    @register_estimator("length_penalised", min_group_size=2, keys=("reward", "group", "response_length"))
    def length_penalised(batch):
        return grpo(batch["reward"] - 0.001 * batch["response_length"], batch["group"])

- `ESTIMATORS`: the registry; its names are the choices of an app's flag, `ESTIMATORS.named(name)` an `Estimator`.
- `Estimator.min_group_size`: the smallest group it says anything about; `check_group_size` refuses smaller ones.
- An *episode* may have several rows (the batch's `episode` i[B]): an estimator sees the first of each, so that a group
  counts it once, and every row gets its advantage. An episode's length is `response_length` i64[B], the trained tokens
  of all its rows, which an estimator that names it among its keys is given.
- `estimate(batch, name)`: the batch's `advantages`, jagged float32 (B, j), checked.
- `per_token(f[B], loss_mask)` and `per_sequence(jagged, loss_mask)`: from a number a sequence to tokens, and back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from objectives.choices import ESTIMATORS as ESTIMATORS
from objectives.choices import check_group_size
from objectives.token_advantages import later_sums
from seqpack.batches.jagged import flattened, is_jagged, jagged_like, ragged
from seqpack.batches.operations import index_select
from seqpack.extensions.options import bound, inputs_of

BatchFunction = Callable[[TensorDict], Tensor]
LENGTH = "response_length"
COMPONENTS = "reward_components"
"""Key of a batch: f[B, K], the rewards that "gdpo" compares apart."""
TOKEN_REWARDS = "token_rewards"
"""Key of a batch: jagged (B, j), the reward of each turn at its last token and NaN elsewhere
(`objectives.token_advantages.at_turn_ends`)."""
WEIGHTS = "reward_weights"
"""Key of a batch: f[B, K], alike in all rows, the weights of the reward components; 1 each without it."""
INPUTS = {"rewards": "reward", "groups": "group", LENGTH: LENGTH, "batch": None}
"""What a function that is not registered may take, by its parameters' names, and the column that each is."""


def grpo(rewards: Tensor, groups: Tensor, normalize_std: bool = True, eps: float = 1e-6, correction: int = 1) -> Tensor:
    """Return (reward - mean of the group) / (std of the group + eps): GRPO (arXiv 2402.03300, section 4.1.2).

    `normalize_std=False` keeps the numerator alone, see `dr_grpo`. `correction=1` is the sample standard deviation (n -
    1 below the fraction), 0 the population's. A group of one sample gets 0: it says nothing about itself.
    """
    value, group, count = _check(rewards, groups)
    if not eps >= 0 or correction not in (0, 1):
        raise ValueError(f"eps must be >= 0 and correction 0 or 1, got eps={eps}, correction={correction}")
    centred = value - (_sum(value, group, count) / count)[group]
    if normalize_std:
        variance = _sum(centred.square(), group, count) / (count - correction).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[group]
    return _zero_where_uniform(centred, value, group)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return reward - mean of the group, with no division: Dr. GRPO (arXiv 2503.20783, section 3.2).

    Use it with the loss aggregation "constant", the other half of that paper's correction.
    """
    return grpo(rewards, groups, normalize_std=False)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return reward - mean of the siblings' rewards: RLOO (arXiv 2402.14740). A group of one sample gets 0."""
    value, group, count = _check(rewards, groups)
    others = (count - 1).clamp(min=1)
    baseline = (_sum(value, group, count)[group] - value) / others[group]
    return _zero_where_uniform(value - baseline, value, group)


leave_one_out = rloo  # its earlier name


def maxrl(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return (reward - mean of the group) / mean of the group: MaxRL (arXiv 2602.02710), for rewards of 0 and above.

    A prompt that few answers solve weighs more, by 1 / its pass rate: the gradient of the log of that rate.
    """
    value, group, count = _check(rewards, groups)
    if bool((value < 0).any()):
        raise ValueError(f"maxrl divides by the mean reward: rewards must be at least 0, got {float(value.min())}")
    mean = (_sum(value, group, count) / count)[group]
    return _zero_where_uniform((value - mean) / torch.where(mean > 0, mean, 1.0), value, group)


def gdpo(rewards: Tensor, groups: Tensor, weights: Sequence[float] | None = None, eps: float = 1e-6) -> Tensor:
    """Return the weighted sum of GRPO's advantages of each reward, divided by its spread in the batch.

    GDPO (arXiv 2601.05242): `rewards` f[B, K], one column a reward; `weights`: K numbers, 1 each by default. Rewards of
    different scales keep their own resolution, which their sum would lose.
    """
    if rewards.ndim != 2 or (weights is not None and len(weights) != rewards.shape[1]):
        given = "" if weights is None else f" and {len(weights)} weights"
        raise ValueError(f"gdpo takes rewards f[B, K] and K weights, got {tuple(rewards.shape)}{given}")
    factors = [1.0] * rewards.shape[1] if weights is None else weights
    parts = [factor * grpo(column, groups, eps=eps) for factor, column in zip(factors, rewards.T, strict=True)]
    return grpo(torch.stack(parts).sum(0), torch.zeros_like(groups), eps=eps)


def turn_grpo(token_rewards: Tensor, loss_mask: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the sum of the normalised rewards of a token's turn and of later ones, jagged f32 (B, j), 0 elsewhere.

    DeepSeekMath's GRPO with process supervision (arXiv 2402.03300, section 4.1.3), with a turn as a step: `grpo` over
    all rewards of all turns in a group. `token_rewards` jagged (B, j), NaN where none is (`token_advantages`).
    """
    values, lengths = _tokens(token_rewards)
    given = ~values.isnan()
    scores = torch.zeros_like(values)
    scores[given] = grpo(values[given], groups[_row_of(lengths, values.device)][given], eps=eps).to(values)
    return later_sums(jagged_like(scores, token_rewards), loss_mask)


def reinforce_plus_plus(rewards: Tensor, lengths: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return (reward - mean) / (std + eps) over the trained tokens of the batch: REINFORCE++ (arXiv 2501.03262).

    `objectives.token_advantages.normalized` is the same for numbers of tokens. There are no groups. `lengths` i[B]: the
    trained tokens of each answer, as often as which its reward counts; None: once each. With KL in the reward the
    advantages of an answer's tokens differ: `objectives.token_advantages`.
    """
    value, group, _ = _check(rewards, torch.zeros_like(rewards))
    weight = torch.ones_like(value) if lengths is None else lengths.to(value)
    total = weight.sum().clamp(min=1)
    centred = value - (weight * value).sum() / total
    spread = ((weight * centred.square()).sum() / (total - 1).clamp(min=1)).sqrt()
    return _zero_where_uniform(centred / (spread + eps), value, group)


def reinforce_plus_plus_baseline(
    rewards: Tensor, groups: Tensor, lengths: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Return REINFORCE++ of reward - mean of the group, its form for several samples of a prompt."""
    return reinforce_plus_plus(dr_grpo(rewards, groups), lengths, eps)


def per_token(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Spread one advantage a sequence over its tokens.

    `advantages` f[B]; `loss_mask` jagged bool (B, j). Returns jagged float32 (B, j): the sequence's advantage at
    trained tokens and 0 elsewhere, ready to be the batch's `advantages`: it composes with the batch's columns.
    """
    trained, lengths = _tokens(loss_mask)
    if advantages.ndim != 1 or advantages.shape[0] != len(lengths):
        raise ValueError(
            f"advantages must have one number for each of the {len(lengths)} rows of loss_mask, "
            f"got {tuple(advantages.shape)}"
        )
    return _where_trained(advantages.float()[_row_of(lengths, trained.device)], trained, loss_mask)


def per_sequence(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Undo `per_token`: return each sequence's mean advantage over its trained tokens, f32[B]; 0 without any."""
    (values, given), (trained, lengths) = _tokens(advantages), _tokens(loss_mask)
    if given != lengths:
        raise ValueError(f"advantages have rows of {given} tokens, loss_mask has rows of {lengths}")
    row = _row_of(lengths, trained.device)[trained]
    total = torch.zeros(len(lengths), dtype=torch.float64, device=values.device)
    return (total.index_add(0, row, values[trained].double()) / row.bincount(minlength=len(lengths)).clamp(1)).float()


@dataclass(frozen=True)
class Estimator:
    """A named advantage: called with a batch it returns the batch's `advantages`, jagged float32 (B, j).

    `function`: batch -> f[B] or jagged (B, j). `min_group_size`: the smallest group for which its advantages are not
    all zero. `keys`: what it reads of the batch besides `loss_mask`.
    """

    name: str
    function: BatchFunction
    min_group_size: int
    keys: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    """Names of `INPUTS` that the function takes in place of a batch."""

    def with_options(self, words: Sequence[str]) -> "Estimator":
        """Return the estimator with the options that NAME=VALUE words give it; ValueError: it does not take them."""
        taken, first = (tuple(INPUTS), 0) if self.inputs else ((), 1)
        return replace(self, function=bound("advantage_options", self.name, self.function, words, taken, first))

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if groups of this size get no advantage other than 0."""
        check_group_size(self.name, group_size)

    def __call__(self, batch: TensorDict) -> Tensor:
        """Estimate the advantages, spread them over the trained tokens, and check them.

        Raises ValueError for missing keys, a result of another shape, and by its row for an advantage of a trained
        token that is not finite.
        """
        missing = sorted({"loss_mask", *self.keys} - {LENGTH, *batch.keys()})
        if missing:
            raise ValueError(f"the advantage {self.name!r} reads keys that the batch does not have: {missing}")
        mask = batch["loss_mask"]
        if LENGTH in self.keys:
            batch = batch.copy()
            batch[LENGTH] = response_lengths(batch)
        result = self._by_episode(batch) if "episode" in batch.keys() else self._values(batch)  # noqa: SIM118
        tokens = result.to(torch.float32) if is_jagged(result) else per_token(result, mask)
        (values, lengths), (trained, wanted) = _tokens(tokens), _tokens(mask)
        if lengths != wanted:
            raise ValueError(f"the advantage {self.name!r} gave rows of {lengths} tokens for rows of {wanted}")
        wrong = trained & ~values.isfinite()
        if bool(wrong.any()):
            index = int(_row_of(lengths, trained.device)[wrong][0])
            raise ValueError(f"the advantage {self.name!r} of row {index} is not finite")
        return _where_trained(values, trained, mask)

    def _values(self, batch: TensorDict) -> Tensor:
        """Return what the function says of a batch; ValueError where that is no tensor."""
        columns = {name: batch if INPUTS[name] is None else batch[INPUTS[name]] for name in self.inputs}
        function: Callable[..., Tensor] = self.function
        result = function(**columns) if self.inputs else function(batch)
        if not isinstance(result, Tensor):
            raise ValueError(
                f"the advantage {self.name!r} gave a {type(result).__name__}: give a tensor, one number a sequence"
            )
        return result

    def _by_episode(self, batch: TensorDict) -> Tensor:
        """Return the advantage of each row; the rows of an episode share one, estimated from its first row."""
        episodes, row_of, of_row = first_rows(batch["episode"])
        if len(episodes) == len(of_row):
            return self._values(batch)
        result = self._values(index_select(batch, row_of.tolist()))
        if is_jagged(result):
            raise ValueError(
                f"the advantage {self.name!r} gives one number a token, and an episode here has several rows: "
                "give one a sequence"
            )
        return result[of_row]


def entry_of(spec: str, function: Any) -> Estimator:
    """Return the estimator of a function that is not registered, by the names of its parameters (`INPUTS`).

    Raises:
        ValueError: it can't be called, or takes none of them.
    """
    if not callable(function):
        raise ValueError(f"--advantage {spec} is a {type(function).__name__}: a function is needed")
    inputs = inputs_of(function, INPUTS)
    if not inputs:
        raise ValueError(f"--advantage {spec} takes none of {', '.join(INPUTS)}: name what it reads so")
    keys = tuple(column for name in inputs if (column := INPUTS[name]) is not None)
    return Estimator(spec, function, 2 if "groups" in inputs else 1, keys, inputs)


def response_lengths(batch: TensorDict) -> Tensor:
    """Return the trained tokens of each row's episode, i64[B], or of the row where the batch has no episodes."""
    trained, sizes = _tokens(batch["loss_mask"])
    lengths = _row_of(sizes, trained.device)[trained].bincount(minlength=len(sizes))
    if "episode" not in batch.keys():  # noqa: SIM118
        return lengths
    numbers, _, of_row = first_rows(batch["episode"])
    return torch.zeros_like(numbers).index_add_(0, of_row, lengths)[of_row]


def first_rows(episode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the E distinct numbers of `episode` i[B], ascending, the first row of each, and each row's index i[B]."""
    numbers, of_row = torch.unique(episode, return_inverse=True)
    rows = torch.arange(len(episode), device=episode.device)
    first = torch.full_like(numbers, len(episode)).scatter_reduce_(0, of_row, rows, "amin")
    return numbers, first, of_row


def register_estimator(
    name: str, *, min_group_size: int = 2, keys: tuple[str, ...] = ("reward", "group")
) -> Callable[[BatchFunction], BatchFunction]:
    """Register the decorated function of a batch as an estimator; see `Estimator` for the options.

    Raises ValueError for a name that is taken and a `min_group_size` below 1.
    """
    if min_group_size < 1:
        raise ValueError(f"min_group_size must be at least 1, got {min_group_size}")

    def register(function: BatchFunction) -> BatchFunction:
        ESTIMATORS.add(name, Estimator(name, function, min_group_size, tuple(keys)))
        return function

    return register


def estimate(batch: TensorDict, name: str, options: Sequence[str] = ()) -> Tensor:
    """Return the `advantages` of a batch by the estimator's name, jagged float32 (B, j); see `Estimator.__call__`.

    `options`: NAME=VALUE words for it.
    """
    return ESTIMATORS.named(name).with_options(options)(batch)


@register_estimator("grpo")
def _grpo(batch: TensorDict) -> Tensor:
    return grpo(batch["reward"], batch["group"])


@register_estimator("dr_grpo")
def _dr_grpo(batch: TensorDict) -> Tensor:
    return dr_grpo(batch["reward"], batch["group"])


@register_estimator("rloo")
def _rloo(batch: TensorDict) -> Tensor:
    return rloo(batch["reward"], batch["group"])


@register_estimator("maxrl")
def _maxrl(batch: TensorDict) -> Tensor:
    return maxrl(batch["reward"], batch["group"])


@register_estimator("gdpo", keys=(COMPONENTS, "group"))
def _gdpo(batch: TensorDict) -> Tensor:
    weights = batch[WEIGHTS][0].tolist() if WEIGHTS in batch.keys() else None  # noqa: SIM118
    return gdpo(batch[COMPONENTS], batch["group"], weights)


@register_estimator("turn_grpo", keys=(TOKEN_REWARDS, "group"))
def _turn_grpo(batch: TensorDict) -> Tensor:
    return turn_grpo(batch[TOKEN_REWARDS], batch["loss_mask"], batch["group"])


@register_estimator("reinforce_plus_plus", min_group_size=1, keys=("reward", LENGTH))
def _reinforce_plus_plus(batch: TensorDict) -> Tensor:
    return reinforce_plus_plus(batch["reward"], batch[LENGTH])


@register_estimator("reinforce_plus_plus_baseline", keys=("reward", "group", LENGTH))
def _reinforce_plus_plus_baseline(batch: TensorDict) -> Tensor:
    return reinforce_plus_plus_baseline(batch["reward"], batch["group"], batch[LENGTH])


def _tokens(x: Tensor) -> tuple[Tensor, list[int]]:
    """Return the tokens of a jagged (B, j) one row after another, and the rows' lengths."""
    parts = ragged(x)
    return flattened(parts), parts.lengths


def _row_of(lengths: list[int], device: torch.device) -> Tensor:
    """Return the number of each token's row, i64[T]."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return torch.arange(len(lengths)).repeat_interleave(sizes).to(device)


def _where_trained(values: Tensor, trained: Tensor, loss_mask: Tensor) -> Tensor:
    """Return values f32[T] as jagged (B, j) like the mask, with zeros where a token is not trained."""
    return jagged_like(torch.where(trained, values, 0.0), loss_mask)


def _check(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards in float64, dense group numbers, and the size of each group (float64)."""
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            "rewards and groups must be one-dimensional and of one length, "
            f"got {tuple(rewards.shape)} and {tuple(groups.shape)}"
        )
    value = rewards.detach().to(torch.float64)
    if not bool(torch.isfinite(value).all()):
        row = int((~torch.isfinite(value)).nonzero()[0])
        raise ValueError(f"the reward of row {row} is {float(value[row])}: rewards must be finite")
    _, group = torch.unique(groups, return_inverse=True)
    count = torch.bincount(group).to(torch.float64)
    return value, group, count


def _sum(value: Tensor, group: Tensor, count: Tensor) -> Tensor:
    return torch.zeros_like(count).index_add_(0, group, value)


def _zero_where_uniform(advantage: Tensor, value: Tensor, group: Tensor) -> Tensor:
    """Return float32 advantages, exactly 0 in groups of equal rewards: 1 / eps must not amplify a mean's rounding."""
    uniform = per_group(value, group, "amin") == per_group(value, group, "amax")
    return torch.where(uniform, 0.0, advantage).to(torch.float32)


def per_group(values: Tensor, groups: Tensor, how: str) -> Tensor:
    """Return the smallest ("amin") or largest ("amax") value of each one's group, f[B]."""
    numbers, group = torch.unique(groups, return_inverse=True)
    best = values.new_zeros(len(numbers)).scatter_reduce_(0, group, values, how, include_self=False)
    return best[group]
