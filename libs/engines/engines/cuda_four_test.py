"""On four CUDA devices over NCCL: sharded training, without and with context parallelism, gives one device's curve."""

import pytest
import torch
import torch.distributed as dist

from engines import EngineConfig, build_engine
from engines.launch import ensure_group, launch
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import GRPO, SFT

WORLD = 4
pytestmark = [
    pytest.mark.gpu4,
    pytest.mark.skipif(
        torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices, found {torch.cuda.device_count()}"
    ),
]
LENGTHS = [700, 5, 333, 64, 1, 945]
CAP = 256
MODES = ["off", "static:4", "dynamic"]
# (loss, gradient norm): float32 is plain torch on the device, bfloat16 the fused kernels.
BOUNDS = {"float32": (1e-6, 2e-5), "bfloat16": (2e-3, 5e-3)}


def curve(dtype, mode, cap, lengths, objective):
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    config = EngineConfig(device="cuda", dtype=dtype, lr=1e-3, eps=1e-2, max_tokens_per_rank=cap, context_parallel=mode)
    built = build_engine(config, tiny_model(scale=1.0, **FUSED_SIZES))
    steps = [built.train_batch(tiny_batch(lengths, seed=seed, vocab=512), objective) for seed in range(2)]
    return [(step["loss"], step["grad_norm"], step["skipped"]) for step in steps]


def cases(world):
    found = {}
    for dtype in BOUNDS:
        for mode in MODES if world > 1 else ["off"]:
            cap = CAP if mode != "off" else max(LENGTHS)
            found[dtype, mode, "sft"] = curve(dtype, mode, cap, LENGTHS, SFT())
            found[dtype, mode, "grpo"] = curve(dtype, mode, cap, LENGTHS, GRPO(kl_coef=0.1, entropy_coef=0.01))
            # One short sequence: all ranks but one stand by with a row of one token.
            found[dtype, mode, "lonely"] = curve(dtype, mode, cap, [9], SFT())
    return found


@pytest.fixture(scope="module")
def alone():
    made = ensure_group("cuda")
    yield cases(1)
    if made:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def together():
    return launch(cases, (WORLD,), world_size=WORLD, device="cuda")


@pytest.mark.parametrize("what", ["sft", "grpo", "lonely"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_same_curve(together, alone, dtype, mode, what):
    loss, norm = BOUNDS[dtype]
    left, right = alone[dtype, "off", what], together[dtype, mode, what]
    print(left, right)
    for one, four in zip(left, right, strict=True):
        assert one[2] == four[2] == 0.0
        assert four[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert four[1] == pytest.approx(one[1], rel=norm)
