"""Does a model of Qwen3-0.6B's shape learn to write one letter, also when its run is killed on the way?

    PYTHONPATH=.:libs/seqpack:... TESSERA_VLLM_PYTHON=PYTHON python -m apps.grpo.benchmarks.letter_share FOLDER
        [--steps N] [--kill-at N] [FLAGS of the app]

FOLDER is what `qwen3_vs_trl.py FOLDER make` writes. The reward is the share of a letter among an answer's characters.
One run is killed with all its processes after a step and resumed; a control has the same seed and shuffled advantages,
so that nothing but noise moves its reward. The last line is JSON: the mean reward of the first and the last steps of
both, and how many of the control's standard deviations (over its steps) the run ends above it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LETTER, LAST, NEW_TOKENS = "e", 5, 64
REWARD = f"def share(reply, end):\n    return reply.text.count({LETTER!r}) / max(1, len(reply.text))\n"


def words_of(folder: Path, run_dir: Path, steps: int, own: list[str]) -> list[str]:
    """Return the command line of a run."""
    return [
        sys.executable, "-m", "apps.grpo.main", "--recipe", "qwen3-0-6b-gsm8k", "--model", str(folder / "model"),
        "--run-dir", str(run_dir), "--data", str(next((folder / "data").rglob("train.parquet"))),
        "--eval-data", str(next((folder / "data").rglob("test.parquet"))), "--preset", "None",
        "--reward", f"{folder / 'letter.py'}:share", "--max-steps", str(steps), "--eval-every", "1000",
        "--save-every", "5", "--learning-rate", "1e-4", "--sampling.max-new-tokens", str(NEW_TOKENS),
        "--max-episode-tokens", "512", "--max-prompt-tokens", "256", *own,
    ]  # fmt: skip


def rewards_of(run_dir: Path) -> list[float]:
    """Return the mean reward of each step so far."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row["reward"] for row in rows if "reward" in row]


def killed(words: list[str], run_dir: Path, steps: int) -> int:
    """Start a run, kill all its processes once so many steps are done, and return how many were."""
    process = subprocess.Popen(words, start_new_session=True)
    while len(rewards_of(run_dir)) < steps:
        if process.poll() is not None:
            sys.exit(f"the run ended by itself, with {process.returncode}")
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return len(rewards_of(run_dir))


def measure(folder: Path, steps: int, kill_at: int, own: list[str]) -> dict[str, Any]:
    """Do both runs; return what came out."""
    (folder / "letter.py").write_text(REWARD)
    run_dir, control_dir = folder / "letter", folder / "letter-control"
    began = time.monotonic()
    before = killed(words_of(folder, run_dir, steps, own), run_dir, kill_at)
    subprocess.run([*words_of(folder, run_dir, steps, own), "--resume"], check=True)
    control = words_of(folder, control_dir, steps, [*own, "--control-run", "shuffled-advantages"])
    subprocess.run(control, check=True)
    learned, noise = rewards_of(run_dir), rewards_of(control_dir)
    mean, deviation = statistics.fmean(noise), statistics.stdev(noise)
    return {
        "killed after step": before,
        "steps": len(learned),
        "reward, first": statistics.fmean(learned[:LAST]),
        "reward, last": statistics.fmean(learned[-LAST:]),
        "control, first": statistics.fmean(noise[:LAST]),
        "control, last": statistics.fmean(noise[-LAST:]),
        "control's standard deviation": deviation,
        "standard deviations above": (statistics.fmean(learned[-LAST:]) - mean) / deviation,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int, default=12, help="the step after which the run is killed")
    options, own = parser.parse_known_args()
    print("RESULT " + json.dumps(measure(options.folder, options.steps, options.kill_at, own)), flush=True)


if __name__ == "__main__":
    main()
