"""Losses against TRL's own code, in float64, values and gradients: `GRPOTrainer._compute_loss` on given log-probs, and
`GKDTrainer.generalized_jsd_loss` of whole vocabularies."""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.gkd import GKDTrainer

from objectives import GRPO, Totals
from objectives.choices import Divergence
from objectives.divergence import divergence, events
from seqpack import PackedBatch, make_batch, pack_sequences

LENGTHS = (7, 3, 5, 1, 6)
SHAPE = (len(LENGTHS), max(LENGTHS))
LONGEST = 9


@dataclass(frozen=True)
class Rows:
    """Answers, padded as TRL has them: f64 (B, longest); some tokens are a tool's, and no token of one row trains."""

    new: Tensor
    old: Tensor
    ref: Tensor
    entropy: Tensor
    advantages: Tensor
    seen: Tensor
    trained: Tensor

    @staticmethod
    def drawn(seed: int) -> "Rows":
        draw = torch.Generator().manual_seed(seed)

        def noise() -> Tensor:
            return torch.randn(SHAPE, generator=draw, dtype=torch.float64)

        new = -2 * torch.rand(SHAPE, generator=draw, dtype=torch.float64) - 0.01
        advantages = torch.randn(SHAPE[0], generator=draw, dtype=torch.float64)
        seen = torch.arange(SHAPE[1]) < torch.tensor(LENGTHS)[:, None]
        trained = seen & (torch.rand(SHAPE, generator=draw) < 0.8)
        trained[:, 0], trained[1] = seen[:, 0], False
        old, ref = new + 0.5 * noise(), new + 0.5 * noise()
        return Rows(new.requires_grad_(), old, ref, noise().abs(), advantages, seen, trained)

    def packed(self) -> PackedBatch:
        """The rows one after another; each begins with a token of its prompt."""
        rows = []
        for i, length in enumerate(LENGTHS):
            mask = torch.cat([torch.zeros(1, dtype=torch.bool), self.trained[i, :length]])
            row = {"input_ids": torch.zeros(length + 1, dtype=torch.long), "loss_mask": mask}
            rows.append(row | {"advantages": self.advantages[i] * mask})
        packed = pack_sequences(make_batch(rows))
        given = {"advantages": self.advantages[:, None].expand(SHAPE), "old_log_probs": self.old}
        values = given | {"ref_log_probs": self.ref}
        return packed.with_values(**{name: self.one_after_another(value) for name, value in values.items()})

    def one_after_another(self, padded: Tensor) -> Tensor:
        rows = [torch.cat([row.new_zeros(1), row[:length]]) for row, length in zip(padded, LENGTHS, strict=True)]
        return torch.cat(rows)


def of_trl(rows: Rows, entropy_coef: float, **settings: Any) -> Tensor:
    """TRL's loss of a whole step in one micro-batch: its method, with what it reads of a trainer in the trainer's
    place."""
    known = {"beta": 0.0, "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28}
    args: dict[str, Any] = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        **known | {name: value for name, value in settings.items() if name not in args},
        args=SimpleNamespace(**args | {name: value for name, value in settings.items() if name in args}),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        entropy_coef=entropy_coef,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=bool(entropy_coef),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (rows.new, rows.entropy, None),
    )
    trainer.accelerator.sync_gradients = True
    ids = torch.zeros(SHAPE, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": rows.seen.long(),
        "tool_mask": rows.trained.long(),
        "advantages": rows.advantages,
        "old_per_token_logps": rows.old,
        "ref_per_token_logps": rows.ref,
        "num_items_in_batch": rows.trained.sum(),
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


TRL = {"loss_type": "dapo"}
SEQUENCES = GRPO(clip_high=0.28, aggregation="sequence")
TOKENS = GRPO(clip_high=0.28)
SAPO = GRPO(policy_loss="sapo", aggregation="sequence", policy_loss_options=("tau_pos=1.5", "tau_neg=2.5"))
GSPO = GRPO(policy_loss="gspo", aggregation="sequence", clip_low=0.2, clip_high=0.28)
PAIRS: dict[str, tuple[GRPO, dict[str, Any]]] = {
    "grpo": (SEQUENCES, {"loss_type": "grpo"}),
    "bnpo": (TOKENS, {"loss_type": "bnpo"}),
    "dapo": (TOKENS, TRL),
    "dr_grpo": (GRPO(clip_high=0.28, aggregation="constant", max_tokens=LONGEST), {"loss_type": "dr_grpo"}),
    "dual clip": (GRPO(clip_high=0.28, dual_clip=1.5), {**TRL, "delta": 1.5}),
    "cispo": (GRPO(policy_loss="cispo", clip_high=0.4), {"loss_type": "cispo", "epsilon_high": 1.4}),
    "gspo": (GSPO, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "sapo": (SAPO, {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5}),
    "KL to a reference": (GRPO(clip_high=0.28, kl_coef=0.1), {**TRL, "beta": 0.1}),
    "entropy bonus": (GRPO(clip_high=0.28, entropy_coef=0.1), TRL),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_trl(name: str, seed: int) -> None:
    objective, settings = PAIRS[name]
    rows = Rows.drawn(seed)
    want = of_trl(rows, objective.entropy_coef, **settings)
    entropy = rows.one_after_another(rows.entropy) if objective.needs_entropy else None
    totals = Totals(tokens=int(rows.trained.sum()), sequences=len(LENGTHS))
    got, _ = objective(rows.one_after_another(rows.new), entropy, rows.packed(), totals)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(loss, rows.new)[0] for loss in (got, want)]
    assert slopes[0].count_nonzero() > 3
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "weight", "beta"), [("forward", 0.5, 0.0), ("reverse", 0.5, 1.0), ("jsd", 0.5, 0.5), ("jsd", 0.1, 0.1)]
)
def test_divergences_are_those_of_trl(kind: Divergence, weight: float, beta: float) -> None:
    """With one token of the vocabulary as the rest."""
    policy, teacher = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy.requires_grad_()
    tokens = torch.arange(4)[:, None].expand(4, 6)
    tables = (torch.log_softmax(table, -1).T for table in (policy, teacher))
    mine, given = (events(table[:4], table[4], tokens) for table in tables)
    got = divergence(mine, given, kind, weight).sum()
    want = GKDTrainer.generalized_jsd_loss(policy[None], teacher[None], beta=beta, reduction="sum")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(loss, policy)[0] for loss in (got, want)]
    assert slopes[0].abs().max() > 1e-3
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)
