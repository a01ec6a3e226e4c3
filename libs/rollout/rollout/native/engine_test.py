"""The native engine against the module itself: teacher-forced log-probs, greedy generation, loaded state dicts."""

import asyncio
import copy
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel

from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.native.engine import NativeEngine
from rollout.sync.pieces import BucketPiece
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of

VOCAB = 48
Pieces = list[BucketPiece]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(VOCAB)


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(n)] for n in lengths]


def teacher_forced(
    model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of `ids` after `prompt`, by one plain forward pass over one unpadded row."""
    row = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def assert_teacher_forced(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, temperature: float = 1.0
) -> None:
    expected = teacher_forced(model, prompt, list(completion.ids), temperature)
    assert torch.tensor(completion.log_probs).double().sub(expected).abs().max() < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_modules_own_for_mixed_lengths(model: PreTrainedModel, temperature: float) -> None:
    prompts = prompts_of([3, 11, 7, 1, 20, 70, 7])
    done = NativeEngine(model).generate_batch(prompts, Sampling(temperature=temperature, max_new_tokens=9))
    for prompt, completion in zip(prompts, done, strict=True):
        assert len(completion.ids) == 9
        assert_teacher_forced(model, prompt, completion, temperature)


def test_groups_share_a_prefill_and_still_agree(model: PreTrainedModel) -> None:
    prompts = [p for p in prompts_of([5, 9, 4]) for _ in range(4)]
    engine = NativeEngine(model)
    done = engine.generate_batch(prompts, Sampling(max_new_tokens=6, seed=None))
    assert engine.num_prefill_tokens == 5 + 9 + 4
    assert len({c.ids for c in done[:4]}) > 1
    for prompt, completion in zip(prompts, done, strict=True):
        assert_teacher_forced(model, prompt, completion)


def test_rows_that_end_leave_and_the_others_stay_right(model: PreTrainedModel) -> None:
    prompts = prompts_of([4] * 8 + [9] * 8, seed=3)
    stops = tuple(range(2, 14))
    limits = [3, 24] * 8
    settings = [Sampling(max_new_tokens=n, stop_token_ids=stops) for n in limits]
    compacting = NativeEngine(model, compact_below=1.0).generate_batch(prompts, settings)
    keeping = NativeEngine(model, compact_below=0.0).generate_batch(prompts, settings)
    assert [c.ids for c in compacting] == [c.ids for c in keeping]
    for prompt, limit, completion in zip(prompts, limits, compacting, strict=True):
        assert_teacher_forced(model, prompt, completion)
        ended = completion.ids[-1] in stops
        assert completion.stop_reason == ("stop" if ended else "length")
        assert ended or len(completion.ids) == limit
        assert not set(completion.ids[:-1]) & set(stops)


def test_the_batch_ends_when_every_row_has(model: PreTrainedModel) -> None:
    engine = NativeEngine(model)
    engine.generate_batch(prompts_of([4, 6]), Sampling(max_new_tokens=100, stop_token_ids=tuple(range(VOCAB))))
    assert engine.decode_steps == 0


def test_greedy_is_hf_generate(model: PreTrainedModel) -> None:
    prompts = prompts_of([3, 11, 7, 1])
    done = NativeEngine(model).generate_batch(prompts, Sampling(greedy=True, max_new_tokens=12, stop_token_ids=(1,)))
    for prompt, completion in zip(prompts, done, strict=True):
        row = torch.tensor([prompt])
        out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=12, do_sample=False)
        assert list(completion.ids) == out[0, len(prompt) :].tolist()
        assert_teacher_forced(model, prompt, completion)


def test_every_step_draws_anew(model: PreTrainedModel) -> None:
    even = copy.deepcopy(model)
    with torch.no_grad():
        even.model.norm.weight.fill_(-1.0)  # the norm scales by 1 + weight: all logits are 0, all tokens equally likely
    done = NativeEngine(even).generate_batch([[3]] * 400, Sampling(max_new_tokens=3))
    for a, b in ((0, 1), (1, 2), (0, 2)):
        equal = sum(c.ids[a] == c.ids[b] for c in done)
        assert 1 <= equal <= 25  # 400 / 48 = 8.3 expected of independent draws
    assert all(abs(p + math.log(VOCAB)) < 1e-5 for c in done for p in c.log_probs)


def test_max_batch_cuts_the_work_and_changes_nothing(model: PreTrainedModel) -> None:
    prompts = prompts_of([3, 8, 5, 8, 2, 9, 4])
    settings = [Sampling(max_new_tokens=5, seed=i) for i in range(7)]
    whole = NativeEngine(model).generate_batch(prompts, settings)
    parts = NativeEngine(model, max_batch=3).generate_batch(prompts, settings)
    assert [c.ids for c in whole] == [c.ids for c in parts]


def test_a_seed_fixes_a_request_whatever_its_neighbours(model: PreTrainedModel) -> None:
    prompts = prompts_of([3, 8, 5])
    mine = Sampling(max_new_tokens=7, seed=11)
    alone = NativeEngine(model, seed=1).generate_batch(prompts[:1], mine)[0]
    among = NativeEngine(model, seed=2).generate_batch(
        prompts, [mine, Sampling(max_new_tokens=9), Sampling(max_new_tokens=3, temperature=2.0)]
    )[0]
    assert alone.ids == among.ids
    assert alone.ids != NativeEngine(model).generate_batch(prompts[:1], Sampling(max_new_tokens=7, seed=12))[0].ids


def test_the_engines_generator_is_reproducible_and_moves_on(model: PreTrainedModel) -> None:
    prompts = prompts_of([3, 8])
    first, again = NativeEngine(model, seed=5), NativeEngine(model, seed=5)
    a, b = (first.generate_batch(prompts, Sampling(max_new_tokens=12)) for _ in range(2))
    assert a != b
    assert [again.generate_batch(prompts, Sampling(max_new_tokens=12)) for _ in range(2)] == [a, b]


def test_update_weights_is_loading_the_state_dict(model: PreTrainedModel) -> None:
    other = tiny_model(VOCAB, seed=9)
    mine = copy.deepcopy(model)
    engine = NativeEngine(mine, seed=5)
    before = engine.generate_batch(prompts_of([6]), Sampling(max_new_tokens=8, seed=1))[0]
    asyncio.run(engine.update_weights(3, pieces_of(other.named_parameters(), max_elements=100)))
    after = engine.generate_batch(prompts_of([6]), Sampling(max_new_tokens=8, seed=1))[0]
    assert engine.version == 3
    assert before.policy_versions == (0,) * 8
    assert after.policy_versions == (3,) * 8
    assert after.ids == NativeEngine(other).generate_batch(prompts_of([6]), Sampling(max_new_tokens=8, seed=1))[0].ids
    for name, value in other.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value)


def broken_pieces(model: PreTrainedModel, change: Callable[[Pieces], object]) -> Pieces:
    pieces = list(pieces_of(tiny_model(VOCAB, seed=9).named_parameters(), max_elements=500))
    change(pieces)
    return pieces


def drop(name: str) -> Callable[[Pieces], None]:
    return lambda pieces: pieces.__setitem__(slice(None), [p for p in pieces if p.name != name])


def edit(target: str, **changes: Any) -> Callable[[Pieces], None]:
    def change(pieces: Pieces) -> None:
        i = next(i for i, p in enumerate(pieces) if p.name == target)
        pieces[i] = pieces[i]._replace(**changes)

    return change


NORM = "model.layers.1.input_layernorm.weight"
PROJ = "model.layers.0.linear_attn.in_proj_qkv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(NORM), f"never arrived: {NORM}"),
        (edit(NORM, name="model.layers.7.norm.weight"), "unknown weight 'model.layers.7.norm.weight'"),
        (edit(NORM, shape=(16,)), "does not fit"),
        (edit(NORM, offset=8), "lie outside"),
        (edit(PROJ, offset=100), "never"),
        (edit(NORM, flat=torch.zeros(32, dtype=torch.int64), dtype=torch.int64), "cannot become"),
        (lambda pieces: pieces.append(pieces[0]), "twice"),
        (lambda pieces: pieces.pop(next(i for i, p in enumerate(pieces) if p.name == PROJ)), "never"),
    ],
)
def test_a_faulty_update_is_refused_whole(
    model: PreTrainedModel, change: Callable[[Pieces], object], message: str
) -> None:
    mine = copy.deepcopy(model)
    engine = NativeEngine(mine)
    with pytest.raises(ValueError, match=message):
        asyncio.run(engine.update_weights(1, broken_pieces(mine, change)))
    assert engine.version == 0
    for name, value in model.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value)


def test_tied_weights_need_one_name_and_must_not_contradict(model: PreTrainedModel) -> None:
    mine = copy.deepcopy(model)
    pieces = list(pieces_of(model.named_parameters()))
    head = next(p for p in pieces if p.name == "model.embed_tokens.weight")
    asyncio.run(
        NativeEngine(mine).update_weights(
            1, [p for p in pieces if p is not head] + [head._replace(name="lm_head.weight")]
        )
    )
    contrary = BucketPiece("lm_head.weight", head.shape, head.dtype, 0, head.flat + 1)
    with pytest.raises(ValueError, match="tied"):
        asyncio.run(NativeEngine(mine).update_weights(1, [*pieces, contrary]))


def test_weights_only_count_upwards(model: PreTrainedModel) -> None:
    engine = NativeEngine(copy.deepcopy(model), version=4)
    with pytest.raises(ValueError, match="not newer"):
        asyncio.run(engine.update_weights(4, pieces_of(model.named_parameters())))


def test_concurrent_calls_become_one_batch(model: PreTrainedModel) -> None:
    engine = NativeEngine(model)
    prompts = prompts_of([5] * 6)

    async def ask() -> list[Completion]:
        settings = [Sampling(max_new_tokens=4, seed=i) for i in range(6)]
        return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, settings, strict=True)))

    done = asyncio.run(ask())
    assert engine.decode_steps == 3  # the first token comes from the prefill
    assert [c.ids for c in done] == [
        c.ids
        for c in NativeEngine(model).generate_batch(prompts, [Sampling(max_new_tokens=4, seed=i) for i in range(6)])
    ]
    assert [c.ids for c in asyncio.run(ask())] == [c.ids for c in done]  # a second event loop serves as well


def test_pause_holds_back_and_resume_serves(model: PreTrainedModel) -> None:
    engine = NativeEngine(copy.deepcopy(model))

    async def play() -> Completion:
        await engine.pause()
        waiting = asyncio.create_task(engine.generate([5, 6], Sampling(max_new_tokens=3)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.update_weights(1, pieces_of(tiny_model(VOCAB, seed=2).named_parameters()))
        await engine.resume()
        return await waiting

    assert asyncio.run(play()).policy_versions == (1, 1, 1)


def test_abort_returns_what_there_is(model: PreTrainedModel) -> None:
    engine = NativeEngine(model)

    async def play() -> tuple[Completion, Completion]:
        running = asyncio.create_task(engine.generate([5, 6], Sampling(max_new_tokens=250)))
        while engine.decode_steps < 3:
            await asyncio.sleep(0.001)
        await engine.pause("abort")
        cut = await running
        await engine.resume()
        return cut, await engine.generate([5, 6], Sampling(max_new_tokens=2))

    cut, whole = asyncio.run(play())
    assert cut.stop_reason == "abort"
    assert 3 <= len(cut.ids) < 250
    assert len(cut.ids) == len(cut.log_probs) == len(cut.policy_versions)
    assert_teacher_forced(model, [5, 6], cut)
    assert whole.stop_reason == "length"


def test_an_error_reaches_every_caller_and_the_engine_lives_on(model: PreTrainedModel) -> None:
    mine = copy.deepcopy(model)
    engine = NativeEngine(mine)
    with torch.no_grad():
        mine.model.norm.weight.fill_(float("nan"))

    async def ask() -> list[Completion | BaseException]:
        return await asyncio.gather(
            *(engine.generate([3], Sampling(max_new_tokens=2)) for _ in range(3)), return_exceptions=True
        )

    assert all(isinstance(e, ValueError) and "not finite" in str(e) for e in asyncio.run(ask()))
    with torch.no_grad():
        mine.model.norm.weight.zero_()
    assert all(isinstance(c, Completion) for c in asyncio.run(ask()))


def test_no_sequence_goes_past_a_switch_of_rotary_tables() -> None:
    """Past 16 tokens `longrope` turns all tokens of a sequence by its long table; cached keys have the short one."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope,
        pad_token_id=0,
    )  # fmt: skip
    model: Any = Phi3ForCausalLM(config).eval()
    engine = NativeEngine(model)
    prompts = prompts_of([3, 11, 7])
    for prompt, completion in zip(prompts, engine.generate_batch(prompts, Sampling(max_new_tokens=5)), strict=True):
        assert_teacher_forced(model, prompt, completion)
    with pytest.raises(ValueError, match="max_length=16"):
        engine.generate_batch([[3] * 10], Sampling(max_new_tokens=7))
    with pytest.raises(
        ValueError, match=r"max_length=17 is over the 16 tokens of one table.*longrope.*lower max_length"
    ):
        NativeEngine(model, max_length=17)


def test_the_module_keeps_its_training_mode(model: PreTrainedModel) -> None:
    mine = copy.deepcopy(model).train()
    NativeEngine(mine).generate_batch([[3]], Sampling(max_new_tokens=2))
    assert mine.training
    assert isinstance(NativeEngine(mine), RolloutEngine)


def test_user_errors_name_the_fix(model: PreTrainedModel) -> None:
    engine = NativeEngine(model, max_length=16)
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate_batch([[]], Sampling())
    with pytest.raises(ValueError, match="raise max_length"):
        engine.generate_batch([[2] * 10], Sampling(max_new_tokens=7))
    with pytest.raises(ValueError, match="one each"):
        engine.generate_batch([[2]], [Sampling(), Sampling()])
    with pytest.raises(ValueError, match="text alone"):
        asyncio.run(engine.generate([2], Sampling(max_new_tokens=1), media={"image": 1}))
    with pytest.raises(ValueError, match="pause mode"):
        asyncio.run(engine.pause("now"))  # type: ignore[arg-type]
    assert engine.generate_batch([], Sampling()) == []
