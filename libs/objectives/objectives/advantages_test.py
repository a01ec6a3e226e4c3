"""Advantages against the papers' formulas in float64 and their properties; estimators; one from outside."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from objectives import advantages
from objectives.advantages import ESTIMATORS, BatchFunction, Estimator, estimate, register_estimator
from objectives.token_advantages import at_turn_ends
from seqpack import make_batch
from seqpack.batches.jagged import jagged, select

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25, 3.0, 3.0, -2.0])
GROUPS = torch.tensor([7, 7, 2, 7, 2, 9, 2])


def oracle(rewards: Sequence[float], groups: Sequence[int], how: str) -> Tensor:
    """One sample at a time, in plain Python floats."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        same = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        n, mean = len(same), sum(same) / len(same)
        std = math.sqrt(sum((r - mean) ** 2 for r in same) / max(n - 1, 1))
        if how == "grpo":
            out.append((reward - mean) / (std + 1e-6))
        elif how == "dr_grpo":
            out.append(reward - mean)
        else:
            out.append(reward - (sum(same) - reward) / (n - 1) if n > 1 else 0.0)
    return torch.tensor(out, dtype=torch.float32)


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "rloo"])
def test_equals_the_formula(how: str) -> None:
    got = getattr(advantages, how)(REWARDS, GROUPS)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, oracle(REWARDS.tolist(), GROUPS.tolist(), how), atol=2e-6, rtol=2e-6)


def test_population_standard_deviation() -> None:
    got = advantages.grpo(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), eps=0.0, correction=0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0]))


samples = st.lists(st.tuples(st.floats(-4, 4).map(lambda x: round(x, 3)), st.integers(0, 3)), min_size=1, max_size=24)


@given(samples)
def test_any_groups_equal_the_formula(rows: list[tuple[float, int]]) -> None:
    """Groups of one and of two among them, where n - 1 below the fraction matters most."""
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    given_ = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    for how in ("grpo", "dr_grpo", "rloo"):
        got = getattr(advantages, how)(*given_)
        torch.testing.assert_close(got, oracle(rewards, groups, how), atol=1e-4, rtol=1e-4)


def test_a_pair_is_one_over_the_root_of_two() -> None:
    got = advantages.grpo(torch.tensor([0.0, 3.0]), torch.tensor([4, 4]), eps=0.0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0]) / math.sqrt(2))


@given(samples, st.integers(-50, 50))
def test_shift_invariant_and_centred(rows: list[tuple[float, int]], shift: int) -> None:
    rewards = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    groups = torch.tensor([g for _, g in rows])
    for how in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        got = how(rewards, groups)
        torch.testing.assert_close(how(rewards + shift, groups), got, atol=1e-4, rtol=1e-4)
        for group in groups.unique():
            assert abs(float(got[groups == group].sum())) < 1e-3


@given(samples)
def test_scale_and_order(rows: list[tuple[float, int]]) -> None:
    rewards = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    groups = torch.tensor([g for _, g in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for how in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        torch.testing.assert_close(how(rewards[order], groups[order]), how(rewards, groups)[order])
    torch.testing.assert_close(
        advantages.grpo(rewards * 4, groups, eps=0), advantages.grpo(rewards, groups, eps=0), atol=1e-5, rtol=1e-5
    )


@given(st.floats(-100, 100), st.integers(1, 9))
def test_equal_rewards_give_exact_zeros(reward: float, n: int) -> None:
    rewards, groups = torch.full((n,), reward, dtype=torch.float32), torch.zeros(n, dtype=torch.int64)
    for how in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        assert how(rewards, groups).eq(0).all()


def test_a_group_of_one_says_nothing() -> None:
    for how in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        assert how(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))[0] == 0


def test_rounding_of_the_mean_is_not_blown_up() -> None:
    """Three rewards of 0.1 have a mean that is not 0.1; 1 / eps would make a full advantage of the difference."""
    for reward in (0.1, 1 / 3, 1e8 + 0.1, 1e-12):
        rewards = torch.full((3,), reward, dtype=torch.float64)
        assert advantages.grpo(rewards, torch.zeros(3, dtype=torch.int64), eps=0.0).eq(0).all()


def test_reinforce_plus_plus_compares_with_the_batch() -> None:
    """arXiv 2501.03262: normalised by the mean and standard deviation of the whole batch."""
    rewards = [1.0, 0.0, 0.5, 3.0, -2.0]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    want = [(r - mean) / (std + 1e-6) for r in rewards]
    assert advantages.reinforce_plus_plus(torch.tensor(rewards)).tolist() == pytest.approx(want, rel=1e-6)
    assert advantages.reinforce_plus_plus(torch.ones(4)).tolist() == [0.0] * 4
    got = advantages.reinforce_plus_plus(torch.tensor(rewards), eps=1.0).tolist()
    assert got == pytest.approx([(r - mean) / (std + 1) for r in rewards], rel=1e-6)


MASK = [[False, True, True], [False, True], [False]]


def test_per_token_spreads_over_the_mask_and_per_sequence_takes_it_back() -> None:
    mask = jagged([torch.tensor(row) for row in MASK])
    got = advantages.per_token(torch.tensor([2.0, -1.0, 7.0], dtype=torch.float64), mask)
    assert torch.equal((got * mask).values(), got.values())  # it composes with the columns of its batch
    assert [row.tolist() for row in got.unbind()] == [[0.0, 2.0, 2.0], [0.0, -1.0], [0.0]]
    assert got.dtype == torch.float32
    back = advantages.per_sequence(got, mask)
    assert back.dtype == torch.float32
    assert back.tolist() == [2.0, -1.0, 0.0]
    nan = advantages.per_token(torch.tensor([1.0, math.nan, math.nan]), mask)
    assert [len([x for x in row.tolist() if x != 0]) for row in nan.unbind()] == [2, 1, 0]
    uneven = jagged([torch.tensor([9.0, 1.0, 2.0]), torch.tensor([9.0, 4.0]), torch.tensor([9.0])])
    assert advantages.per_sequence(uneven, mask).tolist() == [1.5, 4.0, 0.0]


def test_a_batch_of_no_rows_has_no_advantages() -> None:
    mask = select(jagged([torch.tensor(row) for row in MASK]), [])
    nothing = advantages.per_token(torch.zeros(0), mask)
    assert (len(nothing.unbind()), advantages.per_sequence(nothing, mask).tolist()) == (0, [])


def test_refusals_name_the_fault() -> None:
    with pytest.raises(ValueError, match="row 1 is nan"):
        advantages.grpo(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="row 0 is -inf"):
        advantages.rloo(torch.tensor([-math.inf, math.nan]), torch.tensor([0, 0]))
    for rewards, groups in [(torch.ones(2), torch.zeros(1)), (torch.ones(2, 2), torch.zeros(2, 2))]:
        with pytest.raises(ValueError, match="of one length"):
            advantages.grpo(rewards, groups)
    for options in ({"correction": 2}, {"correction": -1}, {"eps": -1e-9}, {"eps": math.nan}):
        with pytest.raises(ValueError, match="eps must be >= 0 and correction 0 or 1"):
            advantages.grpo(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), **options)
    mask = jagged([torch.tensor([False, True])] * 2)
    for wrong in (torch.ones(1), torch.ones(3), torch.ones(2, 1)):
        with pytest.raises(ValueError, match="one number for each of the 2 rows"):
            advantages.per_token(wrong, mask)


# ------------------------------------------------------------------ estimators


def batch(rewards: Sequence[float] = (1.0, 0.0, 3.0), groups: Sequence[int] = (5, 5, 2)) -> TensorDict:
    rows = zip(MASK, rewards, groups, strict=True)
    return make_batch(
        [{"input_ids": [1] * len(mask), "loss_mask": mask, "reward": r, "group": g} for mask, r, g in rows]
    )


def rows_of(tokens: Tensor) -> list[list[float]]:
    return [row.tolist() for row in tokens.unbind()]


@pytest.mark.parametrize("name", sorted({*ESTIMATORS} - {"turn_grpo"}))  # a number a token: turn_rewards_test
def test_an_estimator_is_its_function_spread_over_tokens(name: str) -> None:
    data = batch()
    data["reward_components"] = torch.stack([data["reward"], data["reward"] ** 2], 1)
    reward = data["reward_components" if name == "gdpo" else "reward"]
    keys = [reward] if name == "reinforce_plus_plus" else [reward, data["group"]]
    keys += [advantages.response_lengths(data)] if name.startswith("reinforce_plus_plus") else []
    want = getattr(advantages, name)(*keys)
    got = estimate(data, name)
    assert got.dtype == torch.float32
    assert rows_of(got) == rows_of(advantages.per_token(want, data["loss_mask"]))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_smallest_group_size_is_the_smallest_that_says_anything(name: str) -> None:
    """A4: with `--group-size 1 --advantage dr_grpo` every advantage is 0, so that nothing is ever learnt."""
    estimator = ESTIMATORS[name]
    for size in range(1, 5):
        rewards, groups = torch.arange(12.0) ** 2, torch.arange(12) // size
        rows = [
            {"input_ids": [1, 2], "loss_mask": [False, True], "reward": r, "group": g}
            for r, g in zip(rewards.tolist(), groups.tolist(), strict=True)
        ]
        data = make_batch(rows).set("reward_components", rewards[:, None])
        data["token_rewards"] = at_turn_ends(rewards[:, None].tolist(), data["loss_mask"])
        speaks = rows_of(estimator(data))
        assert any(map(any, speaks)) == (size >= estimator.min_group_size)
        if any(map(any, speaks)):
            estimator.check_group_size(size)
        else:
            with pytest.raises(ValueError, match=f"'{name}' compares siblings, in groups of {size} .* at least 2, or"):
                estimator.check_group_size(size)


def test_the_names_are_the_choices() -> None:
    assert {name: ESTIMATORS[name].min_group_size for name in ESTIMATORS} == {
        **dict.fromkeys(("grpo", "dr_grpo", "rloo", "maxrl", "gdpo", "turn_grpo", "reinforce_plus_plus_baseline"), 2),
        "reinforce_plus_plus": 1,
    }
    assert all(name == estimator.name for name, estimator in ESTIMATORS.items())
    assert ESTIMATORS.named("leave_one_out") is ESTIMATORS["rloo"]
    assert advantages.leave_one_out is advantages.rloo
    with pytest.raises(ValueError, match="unknown advantage 'gae': use one of grpo, dr_grpo"):
        estimate(batch(), "gae")
    with pytest.raises(ValueError, match=r"at least 2, or the advantage reinforce_plus_plus$"):
        ESTIMATORS["dr_grpo"].check_group_size(1)
    with pytest.raises(ValueError, match=r"at least 2$"):
        ESTIMATORS["dr_grpo"].check_group_size(0)


def test_keys_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match=r"'grpo' reads keys that the batch does not have: \['group', 'reward'\]"):
        estimate(batch().exclude("reward", "group"), "grpo")
    estimate(batch().exclude("group"), "reinforce_plus_plus")
    with pytest.raises(ValueError, match=r"'reinforce_plus_plus' reads .*: \['loss_mask'\]"):
        estimate(batch().exclude("loss_mask"), "reinforce_plus_plus")


Register = Callable[..., Callable[[BatchFunction], BatchFunction]]


@pytest.fixture
def register() -> Iterator[Register]:
    """Registers for the length of a test, as the file of a recipe would for good."""
    before = dict(ESTIMATORS)
    yield register_estimator
    ESTIMATORS._entries.clear()
    ESTIMATORS._entries.update(before)


def test_an_estimator_from_outside_needs_no_other_edit(register: Register) -> None:
    @register("test-short", min_group_size=3, keys=("reward", "group", "bonus"))
    def short(data: TensorDict) -> Tensor:
        difference: Tensor = data["reward"] - data["bonus"]
        return difference

    data = batch()
    data["bonus"] = torch.tensor([0.5, 0.25, 0.0])
    assert "test-short" in tuple(ESTIMATORS)
    assert rows_of(estimate(data, "test-short")) == [[0.0, 0.5, 0.5], [0.0, -0.25], [0.0]]
    with pytest.raises(ValueError, match=r"'test-short' reads .* \['bonus'\]"):
        estimate(batch(), "test-short")
    with pytest.raises(ValueError, match="groups of 2 it is always 0: use a group size of at least 3"):
        ESTIMATORS.named("test-short").check_group_size(2)
    with pytest.raises(ValueError, match="registered already"):
        register("test-short")(short)
    assert short(data).tolist() == [0.5, -0.25, 3.0]
    register("test-alone", min_group_size=1)(short)
    with pytest.raises(ValueError, match=r"at least 3, or the advantage reinforce_plus_plus or test-alone$"):
        ESTIMATORS.named("test-short").check_group_size(1)
    ESTIMATORS.named("test-alone").check_group_size(1)


def test_an_estimator_may_give_a_number_a_token(register: Register) -> None:
    """It reads the whole batch, and what it gives to untrained tokens does not count."""

    @register("test-tokens", keys=())
    def by_position(data: TensorDict) -> Tensor:
        return jagged(
            [torch.where(row, torch.arange(len(row)).double(), math.inf) for row in data["loss_mask"].unbind()]
        )

    got = estimate(batch().exclude("reward", "group"), "test-tokens")
    assert got.dtype == torch.float32
    assert rows_of(got) == [[0.0, 1.0, 2.0], [0.0, 1.0], [0.0]]
    assert ESTIMATORS["test-tokens"].min_group_size == 2


def test_what_an_estimator_returns_is_checked(register: Register) -> None:
    results: dict[str, BatchFunction] = {
        "not finite": lambda data: torch.tensor([0.0, math.nan, 0.0]),
        "one number for each": lambda data: torch.zeros(2),
        r"rows of \[2, 3, 1\] tokens for rows of \[3, 2, 1\]": lambda data: jagged(
            [torch.zeros(2), torch.zeros(3), torch.zeros(1)]
        ),
    }
    for number, (text, function) in enumerate(results.items()):
        register(f"test-{number}")(function)
        with pytest.raises(ValueError, match=text):
            estimate(batch(), f"test-{number}")
    with pytest.raises(ValueError, match="'test-0' of row 1 is not finite"):
        estimate(batch(), "test-0")
    with pytest.raises(ValueError, match="min_group_size must be at least 1, got 0"):
        register("test-none", min_group_size=0)


def batch_of(
    rewards: Sequence[float], groups: Sequence[int], episodes: Iterable[int], trained: Sequence[int] | None = None
) -> TensorDict:
    masks = [[False, *[True] * length] for length in trained or [1] * len(rewards)]
    rows = zip(rewards, groups, episodes, masks, strict=True)
    return make_batch(
        [
            {"input_ids": [n] * len(m), "loss_mask": m, "reward": r, "group": g, "episode": e}
            for n, (r, g, e, m) in enumerate(rows)
        ]
    )


@pytest.mark.parametrize("name", [name for name, e in ESTIMATORS.items() if "reward" in e.keys])
@given(data=st.data())
def test_a_group_counts_an_episode_once_however_many_rows_it_has(name: str, data: st.DataObject) -> None:
    """Rows of one episode stand anywhere in the batch; each gets what the episode would get with one row."""
    count = data.draw(st.integers(2, 6))
    lowest = 0.0 if name == "maxrl" else -2.0
    rewards = data.draw(st.lists(st.floats(lowest, 2, width=32), min_size=count, max_size=count))
    groups = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    rows = data.draw(st.permutations([e for e in range(count) for _ in range(data.draw(st.integers(1, 3)))]))
    single = estimate(batch_of(rewards, groups, range(count), [rows.count(e) for e in range(count)]), name)
    several = estimate(batch_of([rewards[e] for e in rows], [groups[e] for e in rows], rows), name)
    assert [row[1].item() for row in several.unbind()] == pytest.approx(
        [single.unbind()[e][1].item() for e in rows], rel=1e-6, abs=1e-9
    )


def test_counting_rows_would_be_another_advantage() -> None:
    batch = batch_of([1.0, 1.0, 0.0, 0.25], [0, 0, 0, 0], [0, 0, 1, 2])
    counted = advantages.grpo(batch["reward"], batch["group"])
    assert [row[1].item() for row in estimate(batch, "grpo").unbind()] != counted.tolist()
    assert [list(part) for part in advantages.first_rows(torch.tensor([5, 2, 5, 9]))] == [
        [2, 5, 9],
        [1, 0, 3],
        [1, 0, 1, 2],
    ]


def test_one_number_a_token_cannot_be_shared_among_an_episodes_rows() -> None:
    tokens = advantages.Estimator("tokens", lambda batch: batch["loss_mask"].float(), 1, ())
    assert tokens(batch_of([1.0, 0.0], [0, 0], [0, 1])).unbind()[0].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="one number a token"):
        tokens(batch_of([1.0, 1.0], [0, 0], [0, 0]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=8))
def test_an_episodes_length_is_that_of_all_its_rows(rows: list[tuple[float, int]]) -> None:
    """Rows of an episode stand anywhere; who names response_length gets the sum of their trained tokens."""
    batch = make_batch(
        [
            {"input_ids": [0] * (n + 1), "loss_mask": [False] + [True] * n, "reward": 0.0, "group": 0, "episode": e}
            for e, n in rows
        ]
    )
    seen: list[list[int]] = []

    def function(given: TensorDict) -> Tensor:
        seen.append(given["response_length"].tolist())
        return torch.zeros(len(given["reward"]))

    Estimator("lengths", function, 1, ("response_length",))(batch)
    wanted = {e: sum(n for other, n in rows if other == e) for e, _ in rows}
    episodes = [e for e, _ in rows]
    assert seen in ([[wanted[e] for e in sorted(wanted)]], [[wanted[e] for e in episodes]])
    assert "response_length" not in batch.keys()  # noqa: SIM118


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 2)), min_size=1, max_size=9))
def test_maxrl_divides_by_the_mean_of_the_group(rows: list[tuple[float, int]]) -> None:
    rewards, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    got = advantages.maxrl(rewards, groups).tolist()
    for value, (_, group), stored in zip(got, rows, rewards.tolist(), strict=True):
        siblings = [float(torch.tensor(other)) for other, number in rows if number == group]
        mean = sum(siblings) / len(siblings)
        assert value == pytest.approx(0.0 if len(set(siblings)) == 1 else (stored - mean) / mean, rel=1e-4, abs=1e-5)
    with pytest.raises(ValueError, match="rewards must be at least 0"):
        advantages.maxrl(torch.tensor([-1.0, 1.0]), torch.tensor([0, 0]))


def test_gdpo_normalises_each_reward_of_its_own_and_then_the_batch() -> None:
    """Two answers that differ in one small reward alone: their sum hides it beside a large one, GDPO does not."""
    rewards = torch.tensor([[100.0, 1.0], [100.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.5], [2.0, 0.5]])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    parts = [weight * advantages.grpo(rewards[:, k], groups) for k, weight in enumerate((1.0, 2.0))]
    total = (parts[0] + parts[1]).double()
    want = (total - total.mean()) / (total.std() + 1e-6)
    torch.testing.assert_close(advantages.gdpo(rewards, groups, (1.0, 2.0)), want.float())
    with pytest.raises(ValueError, match=r"rewards f\[B, K\] and K weights, got \(6, 2\) and 1 weights"):
        advantages.gdpo(rewards, groups, (1.0,))
