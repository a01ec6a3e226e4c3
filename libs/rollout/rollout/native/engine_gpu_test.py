"""The native engine on a GPU, with whatever fused kernels are installed there."""

import asyncio
import copy

import pytest
import torch

from rollout.engine import Completion, Sampling
from rollout.native.engine import NativeEngine
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 48
PROMPTS = [[5, 9, 7], [2, 3, 4, 5, 6, 7, 8, 9], [11] * 70, [5, 9, 7]]


def test_log_probs_are_the_modules_own_on_the_device() -> None:
    model = tiny_model(VOCAB).cuda()
    done = NativeEngine(model).generate_batch(PROMPTS, [Sampling(max_new_tokens=8, seed=i) for i in range(4)])
    for prompt, completion in zip(PROMPTS, done, strict=True):
        row = torch.tensor([[*prompt, *completion.ids]], device="cuda")
        with torch.no_grad():
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        ids = torch.tensor(completion.ids, device="cuda")
        expected = torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0].cpu()
        # Fused kernels multiply in TF32 whatever the setting, and differ between prefill and decode.
        assert (torch.tensor(completion.log_probs).double() - expected).abs().max() < 2e-2


def test_weights_from_the_cpu_arrive_whole() -> None:
    model = tiny_model(VOCAB).cuda()
    other = tiny_model(VOCAB, seed=9)
    engine = NativeEngine(model)
    asyncio.run(engine.update_weights(1, pieces_of(other.named_parameters(), max_elements=100)))
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value)
    assert engine.generate_batch([[3]], Sampling(max_new_tokens=2))[0].policy_versions == (1, 1)


def test_bfloat16_weights_are_cast_and_sampled() -> None:
    model = copy.deepcopy(tiny_model(VOCAB)).to("cuda", torch.bfloat16)
    engine = NativeEngine(model)
    asyncio.run(engine.update_weights(1, pieces_of(tiny_model(VOCAB, seed=9).named_parameters())))
    done = engine.generate_batch(PROMPTS, Sampling(max_new_tokens=8, seed=3))
    assert all(len(c.ids) == 8 and max(c.log_probs) <= 0 for c in done)


def test_the_lean_pass_and_the_module_agree_on_the_device() -> None:
    model = tiny_model(VOCAB).cuda()
    settings = [Sampling(max_new_tokens=12, seed=i) for i in range(4)]
    lean, module = (NativeEngine(model, decoder=d).generate_batch(PROMPTS, settings) for d in ("lean", "module"))
    for a, b in zip(lean, module, strict=True):
        shared = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), 12)
        assert shared > 0
        ours, theirs = (torch.tensor(c.log_probs[:shared]) for c in (a, b))
        assert (ours - theirs).abs().max() < 2e-2


def test_requests_join_and_leave_on_the_device() -> None:
    engine = NativeEngine(tiny_model(VOCAB).cuda(), max_batch=3)

    async def one(i: int) -> Completion:
        await asyncio.sleep(0.005 * (i % 4))
        return await engine.generate(PROMPTS[i % 4], Sampling(max_new_tokens=3 + i, seed=i))

    async def play() -> list[Completion]:
        return await asyncio.gather(*(one(i) for i in range(10)))

    assert [len(c.ids) for c in asyncio.run(play())] == [3 + i for i in range(10)]
