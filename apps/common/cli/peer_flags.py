"""Hints for the flags of other trainers: TRL's and transformers' arguments, verl's dotted keys.

A name is compared without its dashes and with underscores as dashes; of a dotted key the longest known ending counts
(`actor_rollout_ref.actor.optim.lr` is known by `optim.lr`). A hint that begins with dashes is a flag of ours, any other
is the advice itself.
"""

from collections.abc import Mapping, Sequence

KL = "--objective.kl-coef (the weights that the run starts from are the reference policy)"
KL_IN_REWARD = "no penalty is put into the reward; --objective.kl-coef puts one into the loss"
ALWAYS_LOGGED = "TensorBoard events, metrics.jsonl and report.html are always written: leave it out"
PLANNED = "micro-batches are planned by tokens: --engine.max-tokens-per-rank"
STEPS = "--steps (not passes over the data: a step takes --prompts-per-step of its prompts)"
WHOLE_VOCABULARY = "the trainer scores the whole vocabulary, so answers are sampled from it: leave it out"
SHARED_DEVICES = "--rollout.sleep (vLLM shares the devices that train; with --rollout.ray-workers it has its own)"
BESIDES_THE_LAST = "--keep-checkpoints (besides the last)"

RENAMED = {
    "cluster.environment": "--env",
    "control": "--control-run",
    "engine.allow-untested": "--allow-untested",
    "keep-failures": "--log-failures",
    "keep-groups": "--log-groups",
    "processes": "--nproc-per-node",
    "prompts": "--prompts-per-step",
}
"""Earlier names of our own flags; those of `--cluster.` have lost that prefix."""
COMMON: dict[str, str] = {
    "learning-rate": "--engine.lr",
    "optim.lr": "--engine.lr",
    "lr": "--engine.lr",
    "lr-scheduler-type": "--engine.lr-schedule",
    "warmup-steps": "--engine.warmup-steps",
    "warmup-ratio": "--engine.warmup-steps (steps, not a share of them)",
    "lr-warmup-steps": "--engine.warmup-steps",
    "lr-warmup-steps-ratio": "--engine.warmup-steps (steps, not a share of them)",
    "weight-decay": "--engine.weight-decay",
    "max-grad-norm": "--engine.grad-clip",
    "clip-grad": "--engine.grad-clip",
    "grad-clip": "--engine.grad-clip",
    "adam-beta1": "--engine.betas (both)",
    "adam-beta2": "--engine.betas (both)",
    "adam-epsilon": "--engine.eps",
    "bf16": "--engine.dtype bfloat16",
    "fp16": "--engine.dtype bfloat16 (float16 is not trained)",
    "torch-dtype": "--engine.dtype",
    "dtype": "--engine.dtype",
    "gradient-checkpointing": "--engine.gradient-checkpointing",
    "enable-gradient-checkpointing": "--engine.gradient-checkpointing",
    "gradient-accumulation-steps": PLANNED,
    "micro-batch-size-per-gpu": PLANNED,
    "ppo-micro-batch-size-per-gpu": PLANNED,
    "max-token-len-per-gpu": "--engine.max-tokens-per-rank",
    "ppo-max-token-len-per-gpu": "--engine.max-tokens-per-rank",
    "max-seqlen-per-dp-cp-rank": "--engine.max-tokens-per-rank",
    "seq-length": "--engine.max-tokens-per-rank",
    "use-dynamic-bsz": PLANNED,
    "ulysses-sequence-parallel-size": "--engine.context-parallel static:N",
    "strategy": "--engine.backend",
    "megatron.tensor-model-parallel-size": "--engine.tensor-parallel",
    "pipeline-model-parallel-size": "--engine.pipeline-parallel",
    "expert-model-parallel-size": "--engine.expert-parallel",
    "expert-tensor-parallel-size": "--engine.expert-tensor-parallel",
    "context-parallel-size": "--engine.context-parallel static:N",
    "optimizer-offload": "--engine.optimizer-on-host",
    "freeze-vision-tower": "--engine.vision frozen",
    "image-key": "--media.images-column",
    "nnodes": "--pools.nodes",
    "model-name-or-path": "--model",
    "model-name": "--model",
    "model-path": "--model",
    "model.path": "--model",
    "dataset-name": "--data",
    "dataset": "--data",
    "train-file": "--data",
    "train-files": "--data",
    "val-files": "--eval-data",
    "validation-file": "--eval-data",
    "output-dir": "--run-dir",
    "default-local-dir": "--run-dir",
    "experiment-name": "--run-dir",
    "project-name": "--run-dir",
    "max-steps": "--steps",
    "total-training-steps": "--steps",
    "save-steps": "--save-every",
    "save-freq": "--save-every",
    "eval-steps": "--eval-every",
    "test-freq": "--eval-every",
    "resume-from-checkpoint": "--resume",
    "resume-mode": "--resume",
    "num-processes": "--nproc-per-node",
    "n-gpus-per-node": "--nproc-per-node",
    "report-to": "--tracker (TensorBoard events, metrics.jsonl and report.html are always written)",
    "logging-steps": ALWAYS_LOGGED,
    "trainer.logger": "--tracker (TensorBoard events, metrics.jsonl and report.html are always written)",
    "attn-implementation": "packed attention is chosen by the engine: leave it out",
    "use-peft": "--engine.lora.rank",
    "lora-r": "--engine.lora.rank",
    "lora-rank": "--engine.lora.rank",
    "lora-alpha": "--engine.lora.alpha",
    "lora-target-modules": "--engine.lora.targets",
    "target-modules": "--engine.lora.targets",
    "lora-dropout": "dropout is never applied, so the policy that is trained is the one that was scored: leave it out",
}

GRPO: dict[str, str] = COMMON | {
    "dataset-name": "--data FILE (//apps/grpo:prepare makes one of a data set of the hub)",
    "num-train-epochs": STEPS,
    "total-epochs": STEPS,
    "prompt-key": "--prompt-column",
    "save-total-limit": BESIDES_THE_LAST,
    "max-actor-ckpt-to-keep": BESIDES_THE_LAST,
    "num-generations": "--group-size",
    "rollout.n": "--group-size",
    "n-samples-per-prompt": "--group-size",
    "per-device-train-batch-size": "--prompts-per-step (prompts a step, over all ranks)",
    "train-batch-size": "--prompts-per-step",
    "rollout-batch-size": "--prompts-per-step",
    "ppo-mini-batch-size": "--mini-batches (how many of them, not their size)",
    "ppo-epochs": "--epochs",
    "num-iterations": "--epochs",
    "max-response-length": "--sampling.max-new-tokens",
    "max-completion-length": "--sampling.max-new-tokens",
    "max-new-tokens": "--sampling.max-new-tokens",
    "max-prompt-length": "--max-prompt-tokens",
    "temperature": "--sampling.temperature",
    "epsilon": "--objective.clip-low, and --objective.clip-high",
    "epsilon-high": "--objective.clip-high",
    "clip-ratio": "--objective.clip-low, and --objective.clip-high",
    "clip-ratio-low": "--objective.clip-low",
    "clip-ratio-high": "--objective.clip-high",
    "clip-ratio-c": "--objective.dual-clip",
    "loss-type": "--objective.aggregation, and --objective.policy-loss (cispo)",
    "loss-agg-mode": "--objective.aggregation",
    "loss-mode": "--objective.policy-loss",
    "entropy-coeff": "--objective.entropy-coef",
    "adv-estimator": "--advantage",
    "advantage-estimator": "--advantage",
    "scale-rewards": "--advantage dr_grpo (where rewards are not scaled; grpo scales them)",
    "norm-adv-by-std-in-grpo": "--advantage dr_grpo (where rewards are not scaled; grpo scales them)",
    "beta": KL,
    "kl-coef": KL,
    "use-kl-loss": KL,
    "kl-loss-coef": KL,
    "kl-loss-type": "--objective.kl-estimator (k2 or k3)",
    "use-kl-in-reward": KL_IN_REWARD,
    "kl-ctrl.kl-coef": KL_IN_REWARD,
    "init-kl-coef": KL,
    "top-p": WHOLE_VOCABULARY,
    "top-k": WHOLE_VOCABULARY,
    "use-vllm": "--rollout.engine vllm",
    "rollout.name": "--rollout.engine",
    "vllm-mode": SHARED_DEVICES,
    "vllm-enable-sleep-mode": "--rollout.sleep",
    "free-cache-engine": "--rollout.sleep",
    "param-offload": "--offload",
    "gpu-memory-utilization": "--rollout.memory-share",
    "vllm-gpu-memory-utilization": "--rollout.memory-share",
    "tensor-model-parallel-size": "--rollout.tp (of the sampler; training's is --engine.tensor-parallel)",
    "vllm-tensor-parallel-size": "--rollout.tp",
    "data-parallel-size": "--rollout.dp",
    "enable-prefix-caching": "--rollout.prefix-cache",
    "enable-chunked-prefill": "--rollout.chunked-prefill",
    "max-num-batched-tokens": "--rollout.max-batched-tokens",
    "max-num-seqs": "--rollout.max-requests",
    "max-model-len": "--rollout.max-model-tokens",
    "reward-funcs": "--reward FILE.py:NAME",
    "custom-reward-function.path": "--reward FILE.py:NAME",
    "tools": "--tool FILE.py:NAME",
    "environment-factory": "--environment FILE.py:NAME",
}

SFT: dict[str, str] = COMMON | {
    "num-train-epochs": "--epochs",
    "total-epochs": "--epochs",
    "save-total-limit": BESIDES_THE_LAST,
    "load-best-model-at-end": "--export best",
    "dataset-text-field": "--text-column",
    "prompt-key": "--prompt-column",
    "response-key": "--completion-column",
    "dataset-num-proc": "--data-processes",
    "truncation-mode": "--truncation",
    "completion-only-loss": "of a prompt with its completion the completion alone is trained, always: leave it out",
    "per-device-train-batch-size": "--batch-size (conversations a step, over all ranks)",
    "train-batch-size": "--batch-size",
    "max-length": "--max-tokens",
    "max-seq-length": "--max-tokens",
    "messages-key": "--messages-column",
    "assistant-only-loss": "only the assistant's tokens are trained, always: leave it out",
    "packing": "batches are packed unless --engine.batching says padded: leave it out",
}


def peer_hints(argv: Sequence[str], known: Sequence[str], table: Mapping[str, str]) -> list[str]:
    """Return what to write in place of each word of `argv` that another trainer uses; `known` are our flags."""
    hints: list[str] = []
    for word in argv:
        name = word.partition("=")[0]
        is_flag, is_key = name.startswith("--"), "=" in word and "." in name
        if not (is_flag or is_key) or name.replace("_", "-") in known:
            continue
        hint = _renamed(name) or _lookup(name, table)
        if hint is not None:
            hints.append(f"{name} is {hint} here" if hint.startswith("--") else f"{name}: {hint}")
    return list(dict.fromkeys(hints))


def _renamed(name: str) -> str | None:
    """Return today's name of a flag that was renamed."""
    old = name.removeprefix("--").replace("_", "-")
    return RENAMED.get(old) or ("--" + old.removeprefix("cluster.") if old.startswith("cluster.") else None)


def _lookup(name: str, table: Mapping[str, str]) -> str | None:
    parts = name.removeprefix("++").removeprefix("+").lstrip("-").replace("_", "-").split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((table[ending] for ending in endings if ending in table), None)
