"""How often the isolation check is wrong: false alarms on right models, misses of single boundaries, over seeds.

    PYTHONPATH=libs/seqpack OMP_NUM_THREADS=1 python libs/seqpack/benchmarks/isolation_rates.py --seeds 24

The model is a small hybrid built from `seqpack.ops`: causal convolution, gated delta rule, attention, gated MLPs.
Right: all operations get the boundaries of the row. Planted: one operation of one layer misses one boundary. `slow` and
`fast`: how fast the delta rule's state decays (exp(g) a token: 0.9 to 1, or 1e-4 to 1e-2, where hardly anything of
another sequence is left).
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from seqpack.ops import attention, causal_conv1d, gated_delta_rule
from seqpack.testing.isolation import LENGTHS, check_packing

WIDTH, HEADS, DIM, VOCABULARY = 48, 2, 16, 97
DECAYS = {"slow": (-0.1, 0.0), "fast": (-9.0, -5.0)}


class Layer(nn.Module):
    """Convolution and gated delta rule, or attention, then a gated MLP."""

    def __init__(self, linear: bool, decay: tuple[float, float]) -> None:
        super().__init__()
        self.linear, self.decay = linear, decay
        self.project = nn.Linear(WIDTH, 3 * HEADS * DIM + (2 * HEADS if linear else 0), bias=False)
        self.taps = nn.Parameter(torch.randn(3 * HEADS * DIM, 4) / 2) if linear else None
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, conv_cu: Tensor, mixer_cu: Tensor) -> Tensor:
        """Run packed tokens [T, WIDTH]; the convolution and the mixer each with boundaries of their own."""
        y = self.project(self.norms[0](x))
        if self.taps is not None:
            y, gates = y.split([3 * HEADS * DIM, 2 * HEADS], dim=-1)
            y = causal_conv1d(y, self.taps, None, conv_cu, "silu", backend="torch")
            q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in y.chunk(3, dim=-1))
            low, high = self.decay
            g = low + (high - low) * gates[:, :HEADS].float().sigmoid()
            mixed, _ = gated_delta_rule(q, k, v, g, gates[:, HEADS:].sigmoid(), mixer_cu, backend="torch")
        else:
            q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in y.chunk(3, dim=-1))
            mixed = attention(q, k, v, mixer_cu, max_seqlen=int(mixer_cu.diff().max()))
        x = x + self.out(mixed.flatten(1).to(x.dtype))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return x + down


class Hybrid(nn.Module):
    """Three linear layers and one of attention."""

    def __init__(self, seed: int, decay: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(kind, DECAYS[decay]) for kind in (True, True, False, True))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, cu: Tensor, wrong: tuple[int, str, int] | None = None) -> Tensor:
        """Return logits [T, V]. `wrong` = (layer, operation, boundary): this operation ignores that boundary."""
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            boundaries = {"conv": cu, "mixer": cu}
            if wrong is not None and wrong[0] == index:
                boundaries[wrong[1]] = torch.cat([cu[: wrong[2]], cu[wrong[2] + 1 :]])
            x = layer(x, boundaries["conv"], boundaries["mixer"])
        logits: Tensor = self.head(x)
        return logits


def verdict(seed: int, decay: str, dtype: torch.dtype, wrong: tuple[int, str, int] | None = None) -> bool:
    """Return whether the check finds the model isolated."""
    model = Hybrid(seed, decay).to(dtype)

    def alone(model: nn.Module, ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, torch.tensor([0, ids.numel()], dtype=torch.int32))
        return logits

    report = check_packing(model, lambda m, row: m(row.values["input_ids"], row.cu_seqlens, wrong), alone, seed=seed)
    return report.isolated


def faults() -> Iterator[tuple[int, str, int]]:
    """Yield (layer, operation, boundary): every boundary, in both operations of the first, third and last layer."""
    places = [(0, "mixer"), (0, "conv"), (2, "mixer"), (3, "mixer"), (3, "conv")]
    while True:
        for boundary in range(1, len(LENGTHS)):
            for layer, operation in places:
                yield layer, operation, boundary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=24)
    seeds = parser.parse_args().seeds
    print(
        f"lengths {LENGTHS}, {seeds} seeds\n\n| parameters | decay | false alarms | leaks missed |\n|---|---|---|---|"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for decay in DECAYS:
            alarms = sum(not verdict(seed, decay, dtype) for seed in range(seeds))
            missed = sum(
                verdict(seed, decay, dtype, wrong) for seed, wrong in zip(range(seeds), faults(), strict=False)
            )
            print(
                f"| {str(dtype).removeprefix('torch.')} | {decay} | {alarms} of {seeds} | {missed} of {seeds} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
