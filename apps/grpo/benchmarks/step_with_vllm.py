"""A whole GRPO step of the 0.67B hybrid on one GPU, sampled by vLLM beside it, in each schedule.

    PYTHONPATH=.:libs/seqpack:libs/dyncp:libs/chat_tools:libs/objectives:libs/engines:libs/rollout:libs/runlog \
        TESSERA_VLLM_PYTHON=PYTHON python apps/grpo/benchmarks/step_with_vllm.py \
        [--modes sync one_step_off fully_async] [--steps N] [--copies N] [--no-on-device] [--apart]

64 prompts of 128 tokens, 8 answers of 256 tokens each (random weights seldom stop), through the app as it is: its
flags are printed. Rewards differ within a group, so that every row trains. TRL 1.16 with vLLM colocated took 11.8 s
for this step, 9.0 s without detokenising. With --apart vLLM is in an actor of Ray's on a second GPU, and weights come
by NCCL. Prints a JSON line a mode: medians after the first two steps, in seconds.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from apps.quickstart.tokenizer import build_tokenizer
from rollout.testing.model import HYBRID_067B as SHAPE

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 128, 256
REWARD = "def reward(reply, end):\n    return sum(map(ord, reply.text)) % 97 / 97\n"
VLLM = ('additional_config={"gdn_prefill_backend": "triton"}',)
GRAPHS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
SHARE = 0.36
"""Of the GPU's memory, for all copies of the model together."""
APART = 0.8
"""Of a GPU that vLLM has to itself."""
SHOWN = (
    "step_s",
    "rollout_s",
    "wait_for_rollout_s",
    "train_s",
    "wait_for_weight_checks_s",
    "wait_for_sync_s",
    "export_and_update_weights_s",
)


def make_files(folder: Path, device: str) -> None:
    """Write the model, the prompts and the reward."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    sizes = SHAPE if device == "cuda" else SHAPE | {"hidden_size": 256, "intermediate_size": 256}
    config = Qwen3_5TextConfig(**sizes, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = Qwen3_5ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    random.seed(0)
    rows = []
    for _ in range(8 * PROMPTS):
        text = "".join(random.choices("0123456789", k=PROMPT_TOKENS))
        while len(ids := _rendered(tokenizer, text)) > PROMPT_TOKENS:
            text = text[len(ids) - PROMPT_TOKENS :]
        rows.append(json.dumps({"question": text, "answer": "1"}))
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)


def _rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def flags(folder: Path, mode: str, options: argparse.Namespace) -> list[str]:
    """Return the flags of the app for one run."""
    copies, device = options.copies, options.device
    each = PROMPTS * GROUP // copies
    words = [
        "--recipe", "math", "--model", str(folder / "model"), "--data", str(folder / "prompts.jsonl"),
        "--reward", f"{folder / 'reward.py'}:reward", "--run-dir", str(folder / mode),
        "--max-steps", str(options.steps),
        "--prompts-per-step", str(PROMPTS), "--group-size", str(GROUP), "--max-turns", "1",
        "--sampling.max-new-tokens", str(NEW_TOKENS), "--eval-every", "1000", "--eval-share", "0.02",
        "--save-every", "1000", "--trainer.device", device, "--learning-rate", "1e-6",
        "--trainer.max-tokens-per-rank", "32768",
        "--rollout.engine", "vllm", "--rollout.max-requests", str(each),
        "--rollout.data-parallel", str(copies), "--rollout.copies-per-device", str(copies),
        *(["--rollout.weights-on-device"] if options.on_device and not options.apart else []),
        *(["--rollout.ray-workers", "1"] if options.apart else []),
        "--schedule.mode", mode,
    ]  # fmt: skip
    if device == "cuda":
        share = APART if options.apart else SHARE
        words += ["--rollout.vllm", *VLLM, "--rollout.gpu-memory-utilization", f"{share / copies:.3g}"]
        sizes = [str(size) for size in GRAPHS if size <= each]
        words += ["--rollout.cuda-graph-sizes", *sizes] if options.graphs else []
    if mode != "sync":
        words += ["--objective.off-policy", "truncate"]
    if mode == "fully_async":
        words += ["--schedule.staleness-threshold", str(options.staleness)]
    return words


def medians(run_dir: Path) -> dict[str, float]:
    """Return medians over the steps after the second: seconds, and the gap of sampler's and trainer's log-probs."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step_s" in row][2:]
    metrics = {
        name: statistics.median(row[f"time/{name}"] for row in steps) for name in SHOWN if f"time/{name}" in steps[0]
    }
    ends = [row["time"] for row in steps]
    metrics["between_steps_s"] = statistics.median(b - a for a, b in pairwise(ends))
    for name in (
        "schedule/token_staleness",
        "log_prob_difference",
        "rollout/sampled_tokens",
        "weights/pause_ms",
        "memory/peak_gib",
    ):
        if name in steps[-1]:
            metrics[name] = steps[-1][name]
    return metrics


def main() -> None:
    """Run each mode in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", default=["sync", "one_step_off"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--copies", type=int, default=4, help="of the model in vLLM, all on the device")
    parser.add_argument("--staleness", type=float, default=1.0, help="of fully_async: windows that sampling is ahead")
    parser.add_argument("--apart", action="store_true", help="vLLM has the second GPU, in an actor of Ray's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--on-device", action=argparse.BooleanOptionalAction, default=True, help="weights pass there")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="replay decoding steps")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the runs, in place of a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_files(folder, options.device)
        for mode in options.modes:
            command = [sys.executable, "-m", "apps.grpo.main", *flags(folder, mode, options)]
            print(" ".join(command), flush=True)
            started = time.monotonic()
            subprocess.run(command, check=True)
            facts = {
                "mode": mode,
                "copies": options.copies,
                "apart": options.apart,
                "on_device": options.on_device,
                "whole_run_s": time.monotonic() - started,
                **medians(folder / mode),
            }
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}), flush=True)


if __name__ == "__main__":
    main()
