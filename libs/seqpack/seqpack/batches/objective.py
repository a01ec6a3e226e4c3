"""What a training engine minimises: the Protocol that objectives keep and engines call."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from seqpack.batches.packed import PackedBatch
from seqpack.batches.view import BatchView, Totals

if TYPE_CHECKING:
    from tensordict import TensorDict


@runtime_checkable
class Objective(Protocol):
    """A loss over scored packed tokens.

    The loss of a call is one micro-batch's share: summed over micro-batches and ranks it is the loss of the step.
    Metrics reduce the same way, without anybody knowing what they mean: a scalar tensor is summed; a tensor of shape
    (2,) is a pair (sum, count), both summed, of which sum / count is reported; a key that ends in "/max" is a scalar
    of which the maximum is taken.

    An objective that reads more of the softmax than the token's log-prob says so. `needs_entropy` is asked of all, two
    others only of those that have them: `needs_tokens`, a key of the batch with i64 (B, K, j), distinct tokens (-1:
    none), or `needs_top_k`, a number K of the policy's likeliest ones. The packed batch then has `several_tokens`
    i64[K, T], their `several_log_probs` f32[K, T], and `several_rest` f32[T], the log-prob of all others together
    (-inf where there are none); both have gradients, and are right where `log_probs` is.
    """

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Keys of the batch that the objective reads besides input_ids and loss_mask; checked before anything runs."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """The need for entropies: where False, the engine passes None."""
        ...

    def zero_gradient_rows(self, batch: "TensorDict | BatchView") -> Tensor:
        """Return bool[B]: samples that add exactly nothing to loss and gradient, whatever the policy is."""
        ...

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, packed_batch: PackedBatch, totals: Totals, /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (share of the loss, metrics) of one packed micro-batch of T tokens.

        `log_probs` and `entropy` are f32[T], computed at trained tokens and 0 elsewhere; `totals` are those of the
        whole global batch.
        """
        ...
