"""Splitting into tensors on disk and reading rows of them are inverses, in every form."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.weights.disk_names import DiskNames
from engines.weights.row_shards import rows_of

FORMS = [DiskNames(prefix, split) for prefix in (False, True) for split in (False, True)]
SIZES = st.integers(1, 4)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(FORMS), SIZES, SIZES, SIZES, st.sampled_from(["gate_up_proj", "down_proj"]), SIZES)
def test_what_is_split_is_read_back_by_any_number_of_ranks(
    names: DiskNames, experts: int, half: int, width: int, projection: str, ranks: int
) -> None:
    live = f"model.layers.3.mlp.experts.{projection}"
    shape = (experts, 2 * half, width) if projection == "gate_up_proj" else (experts, width, half)
    tensor = torch.randn(shape)
    disk = dict(names.split(live, tensor))
    assert sum(part.numel() for part in disk.values()) == tensor.numel()
    assert len(disk) == (1 if not names.split_experts else experts * (2 if projection == "gate_up_proj" else 1))
    shares = []
    for rank in range(ranks):
        rows = rows_of(experts, ranks, rank)
        own = torch.full((rows.stop - rows.start, *shape[1:]), torch.nan)
        for read in names.reads(live, shape, rows):
            piece = disk[read.name] if read.rows is None else disk[read.name][read.rows]
            (own[read.index] if read.index else own).copy_(piece)
        shares.append(own)
    assert torch.equal(torch.cat(shares), tensor)
    assert DiskNames.of(disk) == DiskNames(names.text_prefix, names.split_experts)


@pytest.mark.parametrize("names", FORMS)
def test_other_tensors_are_one_tensor(names: DiskNames) -> None:
    for live in ("lm_head.weight", "model.norm.weight", "model.layers.0.mlp.shared_expert.gate_proj.weight"):
        (part,) = names.parts(live, (4, 2))
        inside = names.text_prefix and live.startswith("model.")
        assert part.name == (live.replace("model.", "model.language_model.", 1) if inside else live)
        assert part.index == ()


def test_experts_of_a_carried_head_say_nothing_about_the_model() -> None:
    disk = ["mtp.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"]
    assert not DiskNames.of(disk).split_experts
