"""Losses and advantages of a user, by FILE.py:NAME: options by their signature, results held to the contract."""

import pickle
import re
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from objectives import GRPO, SFT
from objectives.advantages import ESTIMATORS, dr_grpo, estimate, per_sequence
from objectives.losses import POLICY_LOSSES
from objectives.policy_loss import OURS
from seqpack import Totals, make_batch, pack_sequences

SOURCE = """
import torch
from objectives.losses import TokenLoss, register_policy_loss
from objectives.advantages import register_estimator

def plain(tokens, tau: float = 0.5):
    return -tau * tokens.advantages * tokens.log_probs

def told(tokens):
    return TokenLoss(-tokens.advantages * tokens.log_probs, {"half": tokens.mask.float() / 2})

@register_policy_loss("user_code_named", scales_with_advantage=True, clip_low=0.1)
def named(tokens, clip_low, power: int = 1):
    return TokenLoss(-tokens.advantages**power * tokens.log_probs * clip_low, {})

def mean(tokens):
    return -(tokens.advantages * tokens.log_probs).mean()

def detached(tokens):
    return -tokens.advantages * tokens.log_probs.detach()

def narrow(tokens):
    return (-tokens.advantages * tokens.log_probs).bfloat16()

def nothing(tokens):
    return TokenLoss(-tokens.log_probs, {"x": 1.0})

def clashes(tokens, name: str = "kl"):
    return TokenLoss(-tokens.advantages * tokens.log_probs, {name: tokens.mask.float(), "own/kl": tokens.mask})

def scaled(rewards, groups, scale: float = 1.0):
    from objectives.advantages import dr_grpo
    return scale * dr_grpo(rewards, groups)

def lengths(response_length):
    return response_length.float()

@register_estimator("user_code_estimator", keys=("reward",), min_group_size=1)
def registered(batch, plus: float = 0.0):
    return batch["reward"] + plus

def stranger(x):
    return x

def numbers(rewards):
    return rewards.tolist()

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("own") / "own_objectives.py"
    path.write_text(SOURCE)
    yield str(path)
    for registry, name in ((POLICY_LOSSES, "user_code_named"), (ESTIMATORS, "user_code_estimator")):
        registry._entries.pop(name, None)


def batch_of(rewards: tuple[float, ...] = (1.0, 0.0)) -> TensorDict:
    """Two responses of one prompt."""
    return make_batch(
        [
            {
                "input_ids": list(range(length)),
                "loss_mask": [False] + [True] * (length - 1),
                "advantages": torch.full((length,), reward - 0.5),
                "reward": reward,
                "group": 0,
            }
            for length, reward in zip((3, 5), rewards, strict=True)
        ]
    )


def loss_of(objective: GRPO) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of these responses, every log-prob -1."""
    batch = batch_of()
    packed = pack_sequences(batch)
    log_probs = torch.full_like(packed.values["advantages"], -1.0).requires_grad_()
    loss, metrics = objective(log_probs, None, packed, Totals.of(batch))
    loss.backward()
    assert log_probs.grad is not None
    return float(loss.detach()), metrics


def test_a_function_of_a_file_is_a_loss_with_options(file: str) -> None:
    whole = (2 * 0.5 + 4 * -0.5) / 6
    assert loss_of(GRPO(policy_loss=f"{file}:plain"))[0] == pytest.approx(0.5 * whole)
    objective = GRPO(policy_loss=f"{file}:plain", policy_loss_options=("tau=2",))
    assert loss_of(objective)[0] == pytest.approx(2 * whole)
    assert loss_of(pickle.loads(pickle.dumps(objective)))[0] == pytest.approx(2 * whole)
    loss, metrics = loss_of(GRPO(policy_loss=f"{file}:told"))
    assert loss == pytest.approx(whole)
    assert "half" in metrics


def test_a_registered_loss_of_a_file_keeps_what_it_declares(file: str) -> None:
    entry = POLICY_LOSSES.named(f"{file}:named")
    assert (entry.name, entry.scales_with_advantage) == ("user_code_named", True)
    whole = (2 * 0.5 + 4 * -0.5) / 6
    assert loss_of(GRPO(policy_loss=f"{file}:named"))[0] == pytest.approx(0.1 * whole)
    assert loss_of(GRPO(policy_loss="user_code_named", clip_low=0.3))[0] == pytest.approx(0.3 * whole)
    squares = GRPO(policy_loss="user_code_named", policy_loss_options=("power=2",))
    assert loss_of(squares)[0] == pytest.approx(0.1 * 0.25)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "returned loss of shape (): it gives one number a token"),
        ("detached", "has no gradient: it must be made from tokens.log_probs"),
        ("narrow", "returned torch.bfloat16: compute in float32 at least"),
        ("nothing", "returned x of float: it gives one number a token"),
    ],
)
def test_a_loss_is_held_to_its_contract(file: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        loss_of(GRPO(policy_loss=f"{file}:{name}"))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("plain", ("taw=1",), "there is no option 'taw', did you mean tau?"),
        ("plain", ("tau=x",), "tau: float = 0.5 can't be 'x'"),
        ("named", ("clip_low=1",), "there is no option 'clip_low'"),
        ("number", (), "is a int: a function of `objectives.losses.PolicyTokens` is needed"),
        ("plian", (), "has no 'plian' for --loss; did you mean plain"),
    ],
)
def test_wrong_options_and_names_are_refused_when_it_is_made(
    file: str, name: str, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GRPO(policy_loss=f"{file}:{name}", policy_loss_options=words)
    with pytest.raises(ValueError, match=re.escape("(ppo; it has no options)")):
        GRPO(policy_loss_options=("tau=1",))


def test_a_function_of_a_file_is_a_loss_of_supervised_training(file: str) -> None:
    batch = batch_of()
    packed = pack_sequences(batch)
    log_probs = torch.full_like(packed.values["advantages"], -2.0).requires_grad_()
    found = {name: SFT(loss=f"{file}:{name}")(log_probs, None, packed, Totals.of(batch)) for name in ("plain", "told")}
    assert float(found["plain"][0].detach()) == pytest.approx(0.5 * 2)
    assert float(found["told"][0].detach()) == float(SFT()(log_probs, None, packed, Totals.of(batch))[0].detach())
    assert set(found["told"][1]) == {"nll", "half"}
    for options, message in (
        ({"loss": f"{file}:plain", "loss_options": ("taw=1",)}, "loss_options: there is no option 'taw'"),
        ({"loss_options": ("tau=1",)}, "loss_options=('tau=1',) has no effect: loss 'nll' has none"),
        ({"loss": "mse"}, "unknown loss 'mse': use one of nll"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            SFT(**options)
    with pytest.raises(ValueError, match="returned loss of shape"):
        SFT(loss=f"{file}:mean")(log_probs, None, packed, Totals.of(batch))


def test_a_function_of_a_file_is_an_advantage_with_options(file: str) -> None:
    batch = batch_of()
    want = dr_grpo(batch["reward"], batch["group"])
    found = estimate(batch, f"{file}:scaled", ("scale=3",))
    assert per_sequence(found, batch["loss_mask"]).tolist() == (3 * want).tolist()
    assert per_sequence(estimate(batch, f"{file}:lengths"), batch["loss_mask"]).tolist() == [2.0, 4.0]
    plus = estimate(batch, f"{file}:registered", ("plus=1",))
    assert per_sequence(plus, batch["loss_mask"]).tolist() == [2.0, 1.0]
    assert ESTIMATORS.named(f"{file}:scaled").min_group_size == 2
    assert ESTIMATORS.named(f"{file}:lengths").min_group_size == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stranger", "takes none of rewards, groups, response_length, batch"),
        ("number", "is a int: a function is needed"),
        ("numbers", "gave a list: give a tensor"),
    ],
)
def test_what_is_no_advantage_is_refused(file: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate(batch_of(), f"{file}:{name}")


@pytest.mark.parametrize("name", ["kl", "entropy", "policy_loss", "approx_kl", "mismatch/ess"])
def test_a_metric_of_a_loss_takes_no_name_of_ours(file: str, name: str) -> None:
    text = f"reports {name}, which the objective reports itself: give another name, such as own/{name}"
    with pytest.raises(ValueError, match=re.escape(text)):
        loss_of(GRPO(policy_loss=f"{file}:clashes", policy_loss_options=(f"name={name}",)))
    assert "own/kl" in loss_of(GRPO(policy_loss=f"{file}:clashes", policy_loss_options=("name=mine",)))[1]


def test_the_names_that_are_ours_are_all_that_we_report(file: str) -> None:
    """Those of `GRPO` with all that it can report, but for what the loss reports."""
    batch = batch_of()
    for key in ("old_log_probs", "rollout_log_probs", "ref_log_probs"):
        batch[key] = batch["advantages"] * 0 - 1
    packed = pack_sequences(batch)
    log_probs = torch.full_like(packed.values["advantages"], -1.0).requires_grad_()
    objective = GRPO(policy_loss=f"{file}:plain", kl_coef=0.1, entropy_coef=0.1, off_policy="truncate")
    metrics = objective(log_probs, log_probs.detach(), packed, Totals.of(batch))[1]
    assert {name for name in metrics if not name.startswith("mismatch/")} == OURS - {"nll"}
