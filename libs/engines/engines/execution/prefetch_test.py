"""What is prepared ahead of time is what would be prepared in time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import EngineConfig, LocalBatch, TrainEngine, build_engine
from engines.execution import prefetch as ahead
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.execution.prefetch import PrefetchedMicroBatches, PrefetchedStep, tensors_in
from engines.parallel.planning import PlannedRows
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack import view_batch
from seqpack.adapters.context import PackedContext


def engine() -> TrainEngine:
    return build_engine(EngineConfig(device="cpu", lr=1e-2, max_tokens_per_rank=20), tiny_model(num_hidden_layers=2))


def test_a_prefetched_batch_gives_the_same_step() -> None:
    plain, early = engine(), engine()
    batches = [tiny_batch([7, 3, 12, 5], seed=seed) for seed in range(4)]
    objective = GRPO()
    expected = [plain.train_batch(batch, objective) for batch in batches]
    got = []
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        if following is not None:
            early.prefetch(following, objective)
        got.append(early.train_batch(batch, objective))
    assert got == expected


def test_another_batch_or_objective_is_prepared_in_time() -> None:
    plain, early = engine(), engine()
    one, other = tiny_batch([7, 3]), tiny_batch([5, 6], seed=1)
    early.prefetch(one, SFT())
    assert early.train_batch(other, SFT()) == plain.train_batch(other, SFT())
    assert early.train_batch(one, GRPO()) == plain.train_batch(one, GRPO())


def test_an_error_is_raised_where_the_batch_is_trained() -> None:
    built, batch = engine(), tiny_batch([7, 30])
    built.prefetch(batch, SFT())
    built.train_batch(tiny_batch([7, 3]), SFT())
    with pytest.raises(ValueError, match="30"):
        built.train_batch(batch, SFT())
    built.train_batch(tiny_batch([7, 3]), SFT())


def test_parts_are_refused() -> None:
    batch = tiny_batch([7, 3])
    with pytest.raises(ValueError, match="prefetch takes whole batches"):
        engine().prefetch(LocalBatch(batch, (0, 1), (7, 3)), SFT())


def test_what_is_ahead_is_taken_once() -> None:
    step, batch, objective = PrefetchedStep(), object(), object()
    for request in ((object(), objective), (batch, object())):
        step.ask(batch, objective, lambda: 7)
        step.run()
        assert step.take(*request) is None
    step.ask(batch, objective, lambda: 7)
    assert step.take(batch, objective) is None  # not run yet
    step.run()
    assert step.take(batch, objective) == 7
    assert step.take(batch, objective) is None


def test_every_tensor_is_found_once() -> None:
    @dataclass
    class Holder:
        inner: dict[str, Any]
        same: object

    base, hidden = torch.zeros(1), torch.ones(1)
    base.extra = (hidden, base)  # type: ignore[attr-defined]
    context = PackedContext(torch.zeros(2), 1)
    context.derived["more"] = torch.zeros(3)
    tensors = list(tensors_in(Holder({"a": [base, context]}, base)))
    assert [id(one) for one in tensors] == [id(base), id(hidden), id(context.cu_seqlens), id(context.derived["more"])]


def group_of(ranks: tuple[int, ...]) -> Any:
    """What stands for a process group."""
    return f"group of {ranks}"


class Cuda:
    """CUDA's streams and events, which write down what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[Any] = []
        cuda = self
        now: list[Any] = ["the step's"]

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device = device

        class Event:
            def record(self, stream: Any) -> None:
                assert now[-1] is stream  # what it stands for was queued before it
                self.number = sum(what == "recorded" for what, _ in cuda.happened)
                cuda.happened.append(("recorded", stream.device.type))

        @contextmanager
        def stream(one: Any) -> Iterator[None]:
            now.append(one)
            yield
            now.pop()

        def devices_of(device: torch.device) -> SimpleNamespace:
            waits = SimpleNamespace(wait_event=lambda event: cuda.happened.append(("waited", (device, event.number))))
            return SimpleNamespace(
                kind="cuda",
                new_stream=lambda: Stream(device),
                new_event=Event,
                on_stream=stream,
                current_stream=lambda: waits,
            )

        monkeypatch.setattr(ahead, "devices_of", devices_of)
        self.on_own_stream = lambda: now[-1] != "the step's"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    ahead._stream.cache_clear()
    yield Cuda(monkeypatch)
    ahead._stream.cache_clear()


@pytest.mark.parametrize("begin", [True, False])
def test_micro_batches_ahead_are_the_micro_batches(cuda: Cuda, begin: bool) -> None:
    """Made on a stream of their own, one at a time, each waited for before it is handed out."""
    batch = view_batch(tiny_batch([5, 3, 6, 4]))
    parts = [PlannedRows((3, 1), (0,)), PlannedRows((), (0,)), PlannedRows((0, 2), (0, 1))]
    device = torch.device("cpu")
    source = MicroBatches(LocalBatch(batch, (0, 1, 2, 3), batch.lengths), parts, group_of, device, ("input_ids",))

    def prepare(micro_batch: MicroBatch) -> tuple[str, tuple[int, ...]]:
        assert cuda.on_own_stream()
        cuda.happened.append(("made", micro_batch.rows))
        return ("inputs of", micro_batch.rows)

    made = PrefetchedMicroBatches(source, prepare)
    for _ in range(2):
        cuda.happened.clear()
        if begin:
            made.begin()
            assert cuda.happened == [("made", (3, 1)), ("recorded", "cpu")]
        taken = []
        for number, one in enumerate(made):
            assert not cuda.on_own_stream()
            assert cuda.happened[-1] == ("waited", (device, number))
            taken.append(one)
        assert [what for what, _ in cuda.happened] == ["made", "recorded", "waited"] * 3
        assert [one.inputs for one in taken] == [("inputs of", part.rows) for part in parts]
        for one, want in zip(taken, source, strict=True):
            assert (one.rows, one.ranks, one.group) == (want.rows, want.ranks, want.group)
            assert torch.equal(one.wanted, want.wanted)
            assert one.packed.values.keys() == want.packed.values.keys() == {"input_ids"}
            assert torch.equal(one.packed.values["input_ids"], want.packed.values["input_ids"])


def test_memory_is_kept_for_the_stream_that_reads_it(cuda: Cuda) -> None:
    """Tensors of the device alone: the allocator would give those of another stream away too early."""
    recorded = []

    class OnDevice(torch.Tensor):
        device = torch.device("cuda")

        def record_stream(self, stream: Any) -> None:
            recorded.append(self)

    batch = view_batch(tiny_batch([5]))
    source = MicroBatches(
        LocalBatch(batch, (0,), batch.lengths), [PlannedRows((0,), (0,))], lambda _: None, torch.device("cpu")
    )
    inputs = torch.zeros(3).as_subclass(OnDevice)
    list(PrefetchedMicroBatches(source, lambda micro_batch: {"ids": inputs, "host": torch.zeros(2)}))
    assert [id(one) for one in recorded] == [id(inputs)]
