"""What a rank hands on to its right comes from fused kernels: two ranks' shards of a stream, played on one GPU."""

from collections.abc import Callable

import pytest
import torch

from dyncp.ops.gated_delta_rule import _zero_and_unit, _zero_then_unit
from dyncp.sharding.layout import Sharding
from seqpack.ops import backends, fused, probe
from seqpack.ops.op_arguments import DeltaCall

SHARDING = Sharding((0, 70, 1400, 1500), 2)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay and strength of the second rank: 650 tokens of the long sequence, then the last one whole."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 128), (2, 128), (4, 128), (4,), (4,))
    q, k, v, g, beta = (torch.randn(750, *shape, generator=generator) for shape in shapes)
    cast = [x.bfloat16().to("cuda", dtype) for x in (q, k, v, -0.02 * torch.nn.functional.softplus(g), beta.sigmoid())]
    return tuple(cast)


KERNELS = {"fla": "gated_delta_rule_fla", "flash_qla": "gated_delta_rule_flash_qla"}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("run", "calls"), [(_zero_and_unit, 1), (_zero_then_unit, 2)])
def test_states_and_transitions_come_from_fused_kernels(
    run: Callable[..., tuple[torch.Tensor, ...]], calls: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    reason = backends("cuda", torch.bfloat16)["gated_delta_rule"][backend]
    if not reason.available:
        pytest.skip(f"{backend}: {reason.reason}")
    seen: list[DeltaCall] = []
    monkeypatch.setattr(probe, "_loaded", probe._loaded.__wrapped__)  # what it remembers would outlive the patch below
    original = getattr(fused, KERNELS[backend])

    def counted(call: DeltaCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        seen.append(call)
        out: tuple[torch.Tensor, torch.Tensor | None] = original(call)
        return out

    monkeypatch.setattr(fused, KERNELS[backend], counted)
    options = {"scale": None, "l2norm_qk": True, "chunk_size": None, "backend": backend}
    found = run(operands(torch.bfloat16), SHARDING, 1, 650, options)
    assert len(seen) == calls
    state = seen[-1].initial_state
    assert state is not None
    assert torch.equal(state[-1, 0].cpu(), torch.eye(128))
    exact = run(operands(torch.float64), SHARDING, 1, 650, {**options, "backend": "torch"})
    assert len(seen) == calls
    for name, a, b in zip(("out", "ends", "unit", "transition"), found, exact, strict=True):
        assert (a.double() - b).norm() <= 2e-2 * b.norm(), name
