"""vLLM as a backend: what it states in a plan, and what its workers can hold of shrunk models."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from apps.common.samplers import SAMPLERS, sampler_backend, sampler_plan
from apps.common.shrink.fields import ProcessLimit
from apps.common.shrink.model import tiny_shape, transformers_config
from apps.grpo.config import GrpoConfig
from apps.grpo.main import shrunk
from apps.grpo.registry import recipes
from apps.quickstart.model import save_tiny_model
from rollout.vllm.limits.parallel_limits import spread_refusal

RECIPES = recipes()


def test_weights_that_it_does_not_read_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config, backend = GrpoConfig(), sampler_backend("vllm")
    model = save_tiny_model(tmp_path / "model", seed=0)
    described = AutoConfig.from_pretrained(model)
    with pytest.raises(ValueError, match="head_dim 16"):  # the files are no reason
        backend.check_model(config, model, described)
    values = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors .*save it again\)$"):
        backend.check_model(config, model, described)
    torch.save({name: value.bfloat16() for name, value in values.items()}, model / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors .*save_hf") as refused:
        backend.check_model(config, model, described)
    words = shlex.split(str(refused.value).partition("same dtypes: ")[2])
    subprocess.run([sys.executable, *words[1:3]], check=True)
    made = Path(words[-1])
    converted = load_file(made / "model.safetensors")
    assert all(torch.equal(converted[name], value.bfloat16()) for name, value in values.items())
    with pytest.raises(ValueError, match="head_dim 16"):
        backend.check_model(config, made, described)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_plan_has_of_a_sampler_what_its_backend_states(name: str) -> None:
    """A plan does without the backends of this project, and an app without sampling without the modules of both."""
    assert type(sampler_backend(name).plan()) is type(sampler_plan(name))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.origin is not None])
def test_its_workers_share_the_matrices_of_a_shrunk_model(name: str) -> None:
    recipe = RECIPES[name]
    small, _, _ = shrunk(recipe.config, ProcessLimit(32))
    assert recipe.origin is not None
    engine, layout = small.engine, small.cluster.rollout
    shape = tiny_shape(recipe.origin.shape, engine.pipeline_parallel, engine.tensor_parallel)
    config = transformers_config(shape, 0, 1)
    copies = layout.dp if layout.experts_over_copies else 1
    assert spread_refusal(config.get_text_config().to_dict(), layout.tp, layout.ep > 1, cpu=True, copies=copies) is None
