"""Steps of GRPO on a model of Qwen3-0.6B's shape, sampled by vLLM on the same GPU, beside TRL's GRPOTrainer.

    PYTHONPATH=.:libs/seqpack:... TESSERA_VLLM_PYTHON=PYTHON python apps/grpo/benchmarks/qwen3_vs_trl.py FOLDER make
    ... qwen3_vs_trl.py FOLDER ours [--steps N] [--mode sync|one_step_off] [FLAGS of the app]
    ... qwen3_vs_trl.py FOLDER trl [--steps N]

`make` writes a random model, a tokenizer of that size, questions with answers, and a reward that differs within a
group. A step is 64 prompts of 128 tokens with 8 answers of 256 (random weights seldom stop). Ours is the recipe
qwen3-0-6b-gsm8k; TRL samples with vLLM colocated, without checkpointing, in bfloat16 over float32. Each prints a JSON
line: the median seconds between the ends of steps after the second, and tokens of answers a second.
With `--size 2b` the model has the shape of Qwen3.5-2B's text part, and ours is the recipe qwen3-5-2b-gsm8k.
"""

import argparse
import itertools
import json
import random
import statistics
import string
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from apps.grpo.commands.prepare_data import Prepare, prepare
from apps.quickstart.tokenizer import PAD, TURN_END, TURN_START, chat_template

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 128, 256
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
SHAPE_2B: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}
KINDS: dict[str, tuple[str, Any, Any, dict[str, Any], int]] = {
    "0.6b": ("qwen3-0-6b-gsm8k", Qwen3Config, Qwen3ForCausalLM, SHAPE, 151_669),
    "2b": ("qwen3-5-2b-gsm8k", Qwen3_5TextConfig, Qwen3_5ForCausalLM, SHAPE_2B, 248_077),
}
"""By size: recipe, classes of transformers, sizes, and tokens of the tokenizer."""
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
REWARD = "def reward(reply, end):\n    return sum(map(ord, reply.text)) % 97 / 97\n"
THINKING = "{%- if enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer with so many tokens: bytes, and words of two to four letters."""
    letters = string.ascii_lowercase
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for length in (2, 3, 4):
        for word in itertools.product(letters, repeat=length):
            if len(pieces) >= size - 3:
                break
            merges.append(("".join(word[:-1]), word[-1]))
            pieces.append("".join(word))
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, TURN_START, TURN_END)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=TURN_END)
    tokenizer.chat_template = chat_template().rstrip() + THINKING
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a question as both sides ask it."""
    messages = [{"role": "user", "content": text}]
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False, return_dict=True)[
            "input_ids"
        ]
    )


def make(folder: Path, size: str, small: bool) -> None:
    """Write model, tokenizer, questions of digits, which are a token each, raw and as the app reads them, and the
    reward."""
    torch.manual_seed(0)
    random.seed(0)
    _, config_of, model_of, shape, tokens = KINDS[size]
    sizes = shape | SMALL | {"num_key_value_heads": 1, "head_dim": 32} if small else shape
    tokenizer = tokenizer_of(tokens)
    config = config_of(**sizes, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model_of(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    digits = PROMPT_TOKENS - len(prompt_ids(tokenizer, ""))
    assert len(prompt_ids(tokenizer, "7" * digits)) == PROMPT_TOKENS
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 16 * PROMPTS), ("test", PROMPTS)):
        rows = []
        for _ in range(count):
            text = "".join(random.choices(string.digits, k=digits))
            rows.append(json.dumps({"question": text, "answer": f"so many\n#### {random.randrange(100)}"}))
        (folder / "raw" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)
    prepare(Prepare(str(folder / "raw"), folder / "data"))


def ours(folder: Path, recipe: str, mode: str, steps: int, own: list[str]) -> dict[str, Any]:
    """Run the app; return what its metrics say."""
    run_dir = folder / f"run_{mode}_{len(list(folder.glob('run_*')))}"
    words = [
        "--recipe", recipe, "--model", str(folder / "model"), "--run-dir", str(run_dir),
        "--data", str(next((folder / "data").rglob("train.parquet"))), "--reward", f"{folder / 'reward.py'}:reward",
        "--eval-data", str(next((folder / "data").rglob("test.parquet"))), "--eval-every", "1000",
        "--save-every", "1000", "--preset", "None", "--max-steps", str(steps),
        "--sampling.max-new-tokens", str(NEW_TOKENS), "--max-episode-tokens", "1024", "--max-prompt-tokens", "512",
        "--schedule.mode", mode,
        *(["--objective.off-policy", "truncate", "--rollout.no-sleep"] if mode != "sync" else []),
        *own,
    ]  # fmt: skip
    print(" ".join(words), flush=True)
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "apps.grpo.main", *words], check=True)
    whole = time.monotonic() - started
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in rows if "time/step_s" in row][2:]
    names = sorted({name for row in steady for name in row if name.startswith(("time/", "memory/", "rollout/sampled"))})
    medians = {name: statistics.median(row[name] for row in steady if name in row) for name in names}
    seconds = statistics.median(b["time"] - a["time"] for a, b in pairwise(steady))
    rate = medians["rollout/sampled_tokens"] / seconds
    gap = max(row.get("log_prob_difference", 0.0) for row in steady)
    return {"seconds": seconds, "tokens_s": rate, "whole_s": whole, "log_prob_difference": gap, "flags": own, **medians}


def theirs(folder: Path, steps: int, rows: int, share: float) -> dict[str, Any]:
    """Run TRL's trainer on the same questions."""
    from datasets import Dataset  # TRL's side alone needs them
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    questions = [json.loads(line)["question"] for line in (folder / "raw" / "train.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=PROMPTS * GROUP // rows,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        bf16=True,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=share,
        vllm_max_model_length=1024,
        chat_template_kwargs={"enable_thinking": False},
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
    )

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [sum(map(ord, completion[0]["content"])) % 97 / 97 for completion in completions]

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward,
        config,
        Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in questions]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = statistics.median(b - a for a, b in pairwise(ends[1:]))
    logs = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    return {
        "seconds": seconds,
        "each": [round(b - a, 2) for a, b in pairwise(ends)],
        "tokens_s": PROMPTS * GROUP * logs[-1]["completions/mean_length"] / seconds,
        "mean_length": logs[-1]["completions/mean_length"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=["make", "ours", "trl"])
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch of TRL's")
    parser.add_argument("--share", type=float, default=0.25, help="of the GPU's memory, for TRL's vLLM")
    parser.add_argument("--size", default="0.6b", choices=KINDS)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a dry run")
    options, own = parser.parse_known_args()
    if options.what == "make":
        make(options.folder, options.size, options.small)
        return
    if options.what == "ours":
        results = ours(options.folder, KINDS[options.size][0], options.mode, options.steps, own)
    else:
        results = theirs(options.folder, options.steps, options.rows, options.share)
    print("RESULT " + json.dumps({"what": options.what, "mode": options.mode} | results), flush=True)


if __name__ == "__main__":
    main()
