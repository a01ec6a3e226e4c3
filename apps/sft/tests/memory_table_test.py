"""A fine-tuning run's memory table is the plan's, on one process and on two."""

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.common.run.device_memory import memory_rows
from apps.sft.config import SftConfig
from apps.sft.main import run
from apps.sft.recipes import quickstart
from apps.sft.registry import spec_of
from engines import LoraConfig
from engines.loading import read_config
from runplan.model.model_shape import shape_of
from runplan.report.memory_lines import states_of
from runplan.report.memory_table import memory_table
from seqpack.memory import ledger


def small(run_dir: Path, processes: int = 1, lora: int = 0) -> SftConfig:
    base = quickstart.RECIPE.config
    engine = replace(base.engine, lora=LoraConfig(rank=lora))
    settings = replace(base, steps=3, batch_size=16, eval_every=3, save_every=1, engine=engine)
    return replace(settings, run_dir=run_dir, nproc_per_node=processes, data=replace(base.data, demonstrations=64))


@pytest.mark.parametrize(("processes", "lora"), [(1, 0), (2, 0), (1, 4)])
def test_a_runs_table_is_the_plans(tmp_path: Path, processes: int, lora: int) -> None:
    gc.collect()
    config = small(tmp_path / "run", processes, lora)
    run(config)
    spec, shape = spec_of(config), shape_of(read_config(tmp_path / "run" / "model"), "tiny")
    states = states_of(spec, shape, spec.grid, [shape.layers], disk=4)
    plan = {row.name: row.device + row.host for row in memory_table(spec, shape, states, disk=4)}
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    found = {row.name: row.device + row.host for row in memory_rows(last)}
    assert found.keys() == plan.keys()
    batch = plan.pop(ledger.BATCH)
    assert 0 < found.pop(ledger.BATCH) <= batch
    assert found == pytest.approx(plan, rel=0.05)
