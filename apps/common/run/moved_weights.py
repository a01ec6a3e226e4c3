"""Comparison of a run's export with its weights before training, bit by bit: did training reach what it should?"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from apps.common.run.config_file import CONFIG_NAME
from apps.common.run.idle_steps import IdleRunError
from engines import EngineConfig
from engines.config import parse_learning_rates

TOWER = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)\.")
EXPERT = re.compile(r"\.experts\.\d+\.")
MOST_NAMES = 20


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory's safetensors files, by name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def starting_weights(run_dir: Path) -> Path:
    """Return the directory of a run's weights before training: its warm start's, `--model`, or the ones it made."""
    warm = run_dir / "warm-start" / "export"
    if warm.is_dir():
        return warm
    model = json.loads((run_dir / CONFIG_NAME).read_text(encoding="utf-8")).get("model")
    return Path(model) if model else run_dir / "model"


@dataclass(frozen=True)
class MovedWeights:
    """The tensors that a run trains, and those of them that are what they were."""

    trained: frozenset[str]
    unchanged_weights: frozenset[str]

    @property
    def without_gradient(self) -> list[str]:
        """The unchanged ones, without experts beside which another one of their layer moved: a router may leave some
        out."""
        moved = {EXPERT.sub(".experts.*.", name) for name in self.trained - self.unchanged_weights}
        return sorted(name for name in self.unchanged_weights if EXPERT.sub(".experts.*.", name) not in moved)


def moved_weights(run_dir: Path, engine: EngineConfig) -> MovedWeights:
    """Compare a run's export with its start; a tower that is not trained, and what no adapter is on, do not count."""
    before, after = load_tensors(starting_weights(run_dir)), load_tensors(run_dir / "export")
    names = before.keys() & after.keys()
    if engine.vision != "trained":
        names = {name for name in names if not TOWER.search(name)}
    if engine.lora.rank:
        factors = (name.partition(".lora_")[0] for name in load_tensors(run_dir / "adapter"))
        adapted = {name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in factors}
        stacks = [target.rpartition(".")[2] for target in engine.lora.target_parameters]
        names = {name for name in names if name.removesuffix(".weight") in adapted or _stacked(name, adapted, stacks)}
    names = {name for name in names if not _held(name, engine)}
    same = {name for name in names if torch.equal(before[name].to(after[name].dtype), after[name])}
    return MovedWeights(frozenset(names), frozenset(same))


def _stacked(name: str, adapted: set[str], stacks: list[str]) -> bool:
    """Return whether a weight is of stacked experts with adapters; on disk gate and up may be apart."""
    module, experts, own = name.rpartition(".experts.")
    kind = re.sub(r"^(gate|up)_proj$", "gate_up_proj", own.removesuffix(".weight").rpartition(".")[2])
    return f"{module}{experts}".removesuffix(".") in adapted and kind in stacks


def _held(name: str, engine: EngineConfig) -> bool:
    """Return whether a learning rate of 0 holds a parameter: that of the first pattern which is in its name."""
    rates = parse_learning_rates(engine.learning_rates)
    return next((rate for pattern, rate in rates if re.search(pattern, name)), 1.0) == 0


def check_moved(run_dir: Path, engine: EngineConfig) -> str:
    """Return a line on the weights that a run moved.

    Raises:
        IdleRunError: some that it trains did not move; the text names them.
    """
    weights = moved_weights(run_dir, engine)
    moved, without_gradient = len(weights.trained - weights.unchanged_weights), weights.without_gradient
    told = f"{moved} of {len(weights.trained)} trained tensors differ from the start"
    if without_gradient or not weights.trained:
        more = f" and {len(without_gradient) - MOST_NAMES} more" if len(without_gradient) > MOST_NAMES else ""
        named = ", ".join(without_gradient[:MOST_NAMES])
        raise IdleRunError(f"{run_dir}/export: {told}. Training did not reach: {named or 'any tensor'}{more}")
    rest = f"; {len(weights.unchanged_weights)} experts got no token" if weights.unchanged_weights else ""
    return f"weights: {told}{rest}"
