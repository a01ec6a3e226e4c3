"""Named settings. The two quickstarts learn on two CPU cores within four minutes; `math` suits a real checkpoint."""

from dataclasses import replace

from apps.grpo.config import DataConfig, GrpoConfig, WarmStart
from engines import EngineConfig
from objectives import GRPO
from rollout import Sampling

QUICKSTART = GrpoConfig(
    recipe="quickstart",
    data=DataConfig(task="arithmetic", digits=2, max_prompt_tokens=64),
    steps=120,
    prompts=64,
    group_size=8,
    max_turns=1,
    max_episode_tokens=64,
    eval_every=40,
    save_every=60,
    warm_start=WarmStart(steps=800, until_accuracy=0.4, eval_every=10, batch_size=64, lr=6e-3, warmup_steps=30),
    engine=EngineConfig(device="cpu", lr=8e-4),
    sampling=Sampling(max_new_tokens=7),
    objective=GRPO(clip_high=0.28),
)

QUICKSTART_TOOL = replace(
    QUICKSTART,
    recipe="quickstart-tool",
    data=replace(QUICKSTART.data, task="calculator"),
    steps=50,
    prompts=48,
    eval_every=10,
    save_every=25,
    max_turns=2,
    max_episode_tokens=160,
    warm_start=WarmStart(
        steps=800, until_accuracy=0.25, eval_every=5, eval_prompts=64, batch_size=32, lr=6e-3, warmup_steps=30
    ),
    engine=EngineConfig(device="cpu", lr=8e-4, warmup_steps=5),
    # Cooler than 1: one wrong digit of a copied number spoils an episode of 20 sampled tokens.
    sampling=Sampling(max_new_tokens=24, temperature=0.6),
)

MATH = GrpoConfig(
    recipe="math",
    steps=200,
    prompts=32,
    group_size=8,
    max_turns=1,
    max_episode_tokens=4096,
    eval_every=20,
    save_every=20,
    engine=EngineConfig(lr=1e-6, warmup_steps=5, gradient_checkpointing=True),
    sampling=Sampling(max_new_tokens=2048),
    objective=GRPO(clip_high=0.28),
)

RECIPES = {config.recipe: config for config in (QUICKSTART, QUICKSTART_TOOL, MATH)}
