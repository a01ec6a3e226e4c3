"""What a check of packing measured, what of it counts as rounding, and its account in words."""

from dataclasses import dataclass

import torch

from seqpack.testing.trace import Origin

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tolerance:
    """Largest relative error (norm of the difference over norm of the value) that counts as rounding.

    `logits`: packed against alone. `grads`: likewise, each parameter. `moved`: logits of a sequence when another one is
    changed; the shapes are the same in both runs, so hardly anything may move. `reached`: the gradient of a sequence's
    logits at another sequence's tokens over that at its own, which is exactly zero without a leak.
    """

    logits: float
    grads: float
    moved: float
    reached: float = 1e-12

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Tolerance":
        """Return the defaults for a parameter dtype."""
        return cls(0.02, 0.1, 5e-3) if dtype in HALF else cls(1e-4, 1e-3, 1e-5)


@dataclass(frozen=True)
class IsolationReport:
    """What was measured. `isolated` is the verdict, `str()` the account.

    `logits`: relative error of each sequence; `logit_bound`: what it may be. `worst_grad`: (parameter, relative error),
    None where gradients were not compared; `grad_bound`: what that error may be. `moved`: (changed sequence, sequence
    that moved, relative error), worst first. `reached`: (sequence, sequence whose logits depend on it, relative
    gradient), worst first. `origin`: the module that leaks first.
    """

    logits: tuple[float, ...]
    worst_grad: tuple[str, float] | None
    moved: tuple[tuple[int, int, float], ...]
    origin: Origin | None
    tolerance: Tolerance
    reached: tuple[tuple[int, int, float], ...] = ()
    logit_bound: float = 0.0
    grad_bound: float = 0.0

    @property
    def logits_equal(self) -> bool:
        """The verdict on logits: packed ones equal those of the sequences alone."""
        return max(self.logits) <= self.logit_bound

    @property
    def grads_equal(self) -> bool:
        """The verdict on gradients: packed ones equal those of the sequences alone."""
        return self.worst_grad is None or self.worst_grad[1] <= self.grad_bound

    @property
    def isolated(self) -> bool:
        """The verdict: nothing that was measured tells packed from alone."""
        return self.logits_equal and self.grads_equal and not self.moved and not self.reached

    def _verdict(self) -> str:
        if self.isolated:
            return "packing is isolated"
        if self.moved or self.reached:
            return "packing LEAKS between sequences"
        return "packed is NOT the same as alone, although no sequence moves another's logits"

    def __str__(self) -> str:
        bounds, worst = self.tolerance, max(range(len(self.logits)), key=self.logits.__getitem__)
        lines = [self._verdict()]
        lines.append(
            f"  logits, packed against alone: sequence {worst} off by {self.logits[worst]:.1e} "
            f"(bound {self.logit_bound:.0e})"
        )
        if self.worst_grad:
            name, error = self.worst_grad
            lines.append(f"  gradients: {name} off by {error:.1e} (bound {self.grad_bound:.0e})")
        if self.moved:
            changed, other, error = self.moved[0]
            lines.append(
                f"  changing sequence {changed} moves sequence {other} by {error:.1e} (bound {bounds.moved:.0e}), "
                f"{len(self.moved)} such pairs"
            )
        if self.reached:
            source, other, size = self.reached[0]
            lines.append(
                f"  logits of sequence {other} have a gradient at tokens of sequence {source}, {size:.1e} of that at "
                f"their own (without a leak: 0), {len(self.reached)} such pairs"
            )
        if self.origin:
            lines.append(f"  first seen at {self.origin}")
        return "\n".join(lines)
