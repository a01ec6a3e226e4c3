"""Two gloo processes equal one: curves, gradients, scores, checkpoints over world sizes. One start for all cases."""

import pytest
import torch
import torch.distributed as dist

from engines import EngineConfig, build_engine
from engines.launch import ensure_group, launch
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]
STEPS = 3
KINDS = ["dense", "moe"]


def engine(kind="dense", seed=0, **options):
    config = EngineConfig(
        **{"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 20, "weight_decay": 0.1, **options}
    )
    return build_engine(config, tiny_model(kind, seed=seed, scale=2.0, num_hidden_layers=2))


def weights(built):
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def curve(built, objective, steps=range(STEPS)):
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), objective) for step in steps]


def cases(folder, world):
    """Everything that is compared, as plain data; runs the same in a world of any size."""
    out = {}
    for kind in KINDS:
        built = engine(kind)
        out[kind, "curve"] = curve(built, GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask"))
        out[kind, "weights"] = weights(built)
    padded = engine(batching="padded")
    out["padded", "curve"] = curve(padded, SFT(aggregation="sequence"))
    # Fewer rows than ranks: one rank stands by with nothing to train.
    lonely = engine()
    out["lonely", "curve"] = [lonely.train_batch(tiny_batch([9]), SFT()) for _ in range(2)]
    scored = lonely.forward(tiny_batch(LENGTHS), entropy=True)
    out["scores"] = [scored[key].values() for key in ("log_probs", "entropy")]
    saved = engine()
    curve(saved, SFT(), range(2))
    saved.save(folder / f"world{world}")
    out["resumed", "curve"] = curve(saved, SFT(), range(2, 4))
    saved.save_hf(folder / f"hf{world}")
    out["hf", "weights"] = weights(saved)
    return out


def two_ranks(folder, other):
    out = cases(folder, 2)
    across = engine(seed=3)
    across.load(folder / "world1")
    out["across"] = curve(across, SFT(), range(2, 4))
    try:
        engine().train_batch(tiny_batch([5, 6 + dist.get_rank()]), SFT())
    except RuntimeError as error:
        out["disagree"] = str(error)
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    made = ensure_group("cpu")
    one = cases(folder, 1)
    back = None
    if made:
        dist.destroy_process_group()
    two = launch(two_ranks, (folder, None), world_size=2, device="cpu")
    ensure_group("cpu")
    loaded = engine(seed=4)
    loaded.load(folder / "world2")
    back = curve(loaded, SFT(), range(2, 4))
    yield one, two, back, folder
    dist.destroy_process_group()


def assert_same_curve(one, two):
    for left, right in zip(one, two, strict=True):
        for key in left:
            if key not in ("plan_hash", "micro_batches", "fill"):
                assert right[key] == pytest.approx(left[key], rel=2e-5, abs=1e-6), key


@pytest.mark.parametrize("kind", [*KINDS, "padded", "lonely", "resumed"])
def test_same_curve(results, kind):
    one, two, *_ = results
    assert_same_curve(one[kind, "curve"], two[kind, "curve"])


def test_the_ranks_shared_the_work(results):
    one, two, *_ = results
    assert two["dense", "curve"][0]["micro_batches"] < one["dense", "curve"][0]["micro_batches"]


@pytest.mark.parametrize("kind", [*KINDS, "hf"])
def test_same_weights_after_training(results, kind):
    one, two, *_ = results
    for name, value in one[kind, "weights"].items():
        torch.testing.assert_close(two[kind, "weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_same_scores_on_every_rank(results):
    one, two, *_ = results
    for left, right in zip(one["scores"], two["scores"], strict=True):
        torch.testing.assert_close(right, left, atol=1e-5, rtol=1e-5)


def test_checkpoints_move_between_world_sizes(results):
    one, two, back, _ = results
    assert_same_curve(one["resumed", "curve"], two["across"])
    assert_same_curve(one["resumed", "curve"], back)


def test_hugging_face_directories_agree(results):
    from safetensors.torch import load_file

    *_, folder = results
    left, right = (load_file(folder / f"hf{world}" / "model.safetensors") for world in (1, 2))
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, atol=1e-5, rtol=1e-5)


def test_ranks_with_different_batches_get_an_error(results):
    assert "ranks disagree on the plan" in results[1]["disagree"]
