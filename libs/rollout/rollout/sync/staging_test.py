"""Staged weights: one version in use at any time, the old one back after an abort, and nothing that is not finite."""

import gc
import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.errors import NotFiniteError
from rollout.sync.assembler import WeightAssembler
from rollout.sync.manifest import Manifest, TensorSpec, manifest_of
from rollout.sync.pieces import BucketPiece, bucket_of, buckets
from rollout.sync.staging import WeightStaging
from rollout.testing.pieces import pieces_of

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 2), "b": (5,)}


def values(number: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(number)) for name, shape in SHAPES.items()}


def staging() -> tuple[WeightStaging, dict[str, torch.Tensor]]:
    """A model whose head is tied to "a" and whose buffer may stay away, all zeros."""
    tensors = values(0) | {"buffer": torch.zeros(2)}
    return WeightStaging(tensors, {"head": "a"}, ["buffer"]), tensors


def send(
    receiver: WeightStaging,
    version: int,
    tensors: dict[str, torch.Tensor],
    *,
    manifest: Manifest | None = None,
    cut: int = 2,
) -> list[int]:
    receiver.prepare(manifest or manifest_of(version, pieces_of(tensors.items(), cut)))
    return [receiver.receive(bucket.pieces()) for bucket in buckets(pieces_of(tensors.items(), cut), 32)]


def assert_holds(receiver: WeightStaging, tensors: dict[str, torch.Tensor], version: int, number: float) -> None:
    assert receiver.version == version
    assert all(torch.equal(tensors[name], torch.full(shape, float(number))) for name, shape in SHAPES.items())


@pytest.mark.parametrize("manifest", [None, Manifest(1)])
def test_nothing_changes_before_the_commit(manifest: Manifest | None) -> None:
    receiver, tensors = staging()
    missing = send(receiver, 1, values(7), manifest=manifest)
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] == 0
    assert_holds(receiver, tensors, 0, 0)
    receiver.commit(1)
    assert_holds(receiver, tensors, 1, 7)


def test_an_abort_brings_the_old_weights_back_until_they_are_settled() -> None:
    receiver, tensors = staging()
    send(receiver, 1, values(7))
    receiver.abort()
    assert_holds(receiver, tensors, 0, 0)
    send(receiver, 1, values(7))  # nobody ever used a version 1
    receiver.commit(1)
    receiver.abort()
    assert_holds(receiver, tensors, 0, 0)
    with pytest.raises(ValueError, match="not newer than 1"):
        receiver.prepare(Manifest(1))  # tokens may have been sampled with that one
    send(receiver, 2, values(9))
    receiver.commit(2)
    receiver.settle()
    receiver.abort()
    assert_holds(receiver, tensors, 2, 9)


steps = st.lists(st.sampled_from(["prepare", "receive", "commit", "abort", "settle", "nan"]), max_size=20)


@settings(max_examples=300)
@given(steps)
@example(["prepare", "receive", "nan", "commit"])  # a refused piece must not have written over a good one
def test_whatever_the_order_of_calls_the_weights_are_of_one_version(calls: list[str]) -> None:
    """Version v is the tensors full of v; the model under test is a dictionary of what may be in use."""
    receiver, tensors = staging()
    version = 0
    for call in calls:
        before = receiver.version
        try:
            if call == "prepare":
                version += 1
                receiver.prepare(manifest_of(version, pieces_of(values(version).items())))
            elif call == "receive":
                for bucket in buckets(pieces_of(values(version).items()), 1000):
                    receiver.receive(bucket.pieces())
            elif call == "nan":
                receiver.receive(bucket_of(p).pieces().__next__() for p in pieces_of([("a", values(math.nan)["a"])]))
            elif call == "commit":
                receiver.commit(version)
            elif call == "abort":
                receiver.abort()
            else:
                receiver.settle()
        except ValueError:
            assert receiver.version == before
        assert_holds(receiver, tensors, receiver.version, receiver.version)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_what_is_not_finite_is_refused_by_its_place(bad: float, at: int) -> None:
    receiver, tensors = staging()
    new = values(3)
    new["a"].view(-1)[at] = bad
    with pytest.raises(NotFiniteError, match=rf"^a: element {at} is {bad}"):
        send(receiver, 1, new)
    with pytest.raises(ValueError, match="never arrived"):
        receiver.commit(1)
    receiver.abort()
    assert_holds(receiver, tensors, 0, 0)


def test_a_number_too_large_for_the_models_type_is_not_finite_there() -> None:
    receiver = WeightStaging({"w": torch.zeros(2, dtype=torch.float16)})
    with pytest.raises(ValueError, match=r"element 1 is 70000.0 \(inf as torch.float16\)"):
        receiver.replace(1, pieces_of([("w", torch.tensor([1.0, 70000.0]))]))


def test_a_buffer_may_hold_infinities_and_no_nan() -> None:
    receiver, tensors = staging()
    receiver.replace(1, pieces_of([*values(1).items(), ("buffer", torch.tensor([-math.inf, 0.0]))]))
    assert tensors["buffer"].tolist() == [-math.inf, 0.0]
    with pytest.raises(ValueError, match="buffer: element 0 is nan"):
        receiver.replace(2, pieces_of([*values(1).items(), ("buffer", torch.tensor([math.nan, 0.0]))]))


SPECS = tuple(TensorSpec(name, shape, torch.float32) for name, shape in SHAPES.items())


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (Manifest(1, (*SPECS, TensorSpec("c", (1,), torch.float32))), "unknown weight 'c'"),
        (Manifest(1, SPECS[:1]), "never arrived: b"),
        (Manifest(1, (SPECS[0], TensorSpec("b", (4,), torch.float32))), "does not fit"),
        (Manifest(1, (SPECS[0], TensorSpec("b", (5,), torch.int64))), "cannot become"),
        (Manifest(0, SPECS), "not newer"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_before_a_byte_is_sent(manifest: Manifest, problem: str) -> None:
    receiver, _ = staging()
    with pytest.raises(ValueError, match=problem):
        receiver.prepare(manifest)
    with pytest.raises(ValueError, match="prepare"):
        receiver.receive([])


def test_what_comes_is_what_was_promised() -> None:
    new = values(3)
    receiver, _ = staging()
    receiver.prepare(Manifest(1, SPECS))
    with pytest.raises(ValueError, match="not what the manifest says"):
        receiver.receive(pieces_of([("buffer", torch.zeros(2))]))
    with pytest.raises(ValueError, match="not what the manifest says"):
        receiver.receive(pieces_of([("b", torch.zeros(5, dtype=torch.float64))]))
    receiver.prepare(Manifest(1, SPECS, checksum="0" * 32))
    with pytest.raises(ValueError, match="checksums differ"):
        receiver.receive(pieces_of(new.items()))
    receiver.prepare(Manifest(1, SPECS))
    with pytest.raises(ValueError, match="arrived twice"):
        receiver.receive([*pieces_of([("a", new["a"])]), *list(pieces_of([("a", new["a"])], 5))[:1]])


def test_a_tied_name_serves_for_the_other() -> None:
    receiver, tensors = staging()
    receiver.replace(1, pieces_of([("head", values(4)["a"]), ("b", values(4)["b"])]))
    assert_holds(receiver, tensors, 1, 4)
    manifest = manifest_of(2, pieces_of([("head", values(5)["a"]), ("b", values(5)["b"])]))
    receiver.prepare(manifest)
    assert receiver.receive(pieces_of([("head", values(5)["a"]), ("b", values(5)["b"])])) == 0


def test_a_refused_stream_is_read_to_its_end() -> None:
    receiver, _ = staging()
    read: list[str] = []

    def stream() -> Iterator[BucketPiece]:
        for piece in pieces_of(values(1).items()):
            read.append(piece.name)
            yield piece

    with pytest.raises(ValueError, match="not newer"):
        receiver.replace(0, stream())
    assert read == ["a", "b"]


def test_a_swap_that_breaks_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, tensors = staging()
    send(receiver, 1, values(7))
    exchanged: list[torch.Tensor | None] = []

    def breaking(target: torch.Tensor, value: torch.Tensor) -> None:
        if len(exchanged) == 1:
            exchanged.append(None)
            raise RuntimeError("the device is out of memory")
        exchanged.append(target)
        old = target.clone()
        target.copy_(value)
        value.copy_(old)

    monkeypatch.setattr("rollout.sync.staging._exchange", breaking)
    with pytest.raises(RuntimeError, match="out of memory"):
        receiver.commit(1)
    assert_holds(receiver, tensors, 0, 0)
    receiver.abort()
    assert_holds(receiver, tensors, 0, 0)


def test_a_manifest_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="names 'a' twice"):
        Manifest(1, (SPECS[0], SPECS[0]))
    with pytest.raises(ValueError, match="count from 0"):
        Manifest(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    """At each place of vectors' and their rests' lengths, among large numbers of either sign."""
    for length in (1, 7, 16, 33, 130):
        whole = torch.linspace(-60000, 60000, length).to(dtype)
        assembler = WeightAssembler({"a": whole})
        assembler.add(BucketPiece("a", (length,), dtype, 0, whole))
        for place in range(length):
            wrong = whole.clone()
            wrong[place] = bad
            with pytest.raises(NotFiniteError, match=f"a: element {place} is "):
                assembler.add(BucketPiece("a", (length,), dtype, 0, wrong))


def test_nothing_of_the_second_set_is_held_after_it_is_settled() -> None:
    """A transfer costs one more copy of the weights until then, and no longer."""
    made: list[weakref.ref[torch.Tensor]] = []

    def allocate(name: str, target: torch.Tensor) -> torch.Tensor:
        del name
        memory = torch.empty(target.numel())
        made.append(weakref.ref(memory))
        return memory

    tensors = values(0)
    receiver = WeightStaging(tensors, allocate=allocate)
    send(receiver, 1, values(1))
    receiver.commit(1)
    assert all(one() is not None for one in made)
    receiver.settle()
    gc.collect()
    assert [one for one in made if one() is not None] == []
    assert_holds(receiver, tensors, 1, 1)
