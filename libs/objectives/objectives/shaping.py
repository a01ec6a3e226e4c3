"""Reward shaping by length, and which answers to leave out: pure functions of one number an answer."""

import torch
from torch import Tensor

from objectives.advantages import per_group
from objectives.checks import check_number
from seqpack.batches.jagged import flattened, jagged_like, ragged


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Return what to add to the reward of an answer of `lengths` i[B] tokens: 0, falling to -1 over the last `buffer`.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer, then a straight line,
    -1 from max_tokens on. Raises ValueError unless 1 <= buffer <= max_tokens.
    """
    check_number("buffer", buffer, 1, max_tokens)
    beyond = lengths.to(torch.float64) - (max_tokens - buffer)
    return (-beyond / buffer).clamp(-1, 0).float()


def overlong_filter(loss_mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask without the tokens of answers that were cut off, `truncated` bool[B] (DAPO, section 3.4).

    `loss_mask` jagged bool (B, j). Their rewards still count for their groups.
    """
    parts = ragged(loss_mask)
    mask = flattened(parts)
    rows = torch.tensor(parts.lengths, device=mask.device)
    return jagged_like(mask & ~torch.repeat_interleave(truncated.to(mask.device), rows), loss_mask)


def length_reward(lengths: Tensor, correct: Tensor, groups: Tensor) -> Tensor:
    """Return the length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3), f32[B], from 0.5 to -0.5.

    lambda = 0.5 - (length - shortest) / (longest - shortest) within the group, for `correct` bool[B] answers; a wrong
    one gets min(0, lambda). 0 where a group's answers are of one length. Weigh it before you add it to the reward.
    """
    size = lengths.to(torch.float64)
    low, high = per_group(size, groups, "amin"), per_group(size, groups, "amax")
    spread = high - low
    share = torch.where(spread > 0, 0.5 - (size - low) / spread.clamp(min=1), 0.0)
    return torch.where(correct.bool(), share, share.clamp(max=0)).float()
