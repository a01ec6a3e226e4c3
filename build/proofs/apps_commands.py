"""What `tessera-apps` promises, run in an environment that has it: `python apps_commands.py BIN FOLDER`.

BIN is the environment's folder of programs, FOLDER an empty one to work in. Beside the test that calls `check`, this
runs by hand for each Python, with packages from the index (build/README.md).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

# Few and small steps: what is shown is that each part is there.
GRPO = """--recipe quickstart --max-steps 2 --warm-start.steps 2 --warm-start.eval-prompts 4 --eval-prompts 4
--prompts-per-step 2 --group-size 2 --sampling.max-new-tokens 8"""
CALL = """
import asyncio
import sys
from pathlib import Path

from tessera_apps import RunResult, grpo, plan, sft

CALLS = []
MODEL, DATA = sys.argv[1:]
SMALL = {"max_steps": 1, "prompts_per_step": 2, "group_size": 4, "max_turns": 1, "eval_prompts": 2, "save_every": 1}
ROOM = {"sampling": {"max_new_tokens": 8}, "max_prompt_tokens": 200, "max_episode_tokens": 256}


def reward(reply, reference, end):
    CALLS.append((reply.text, reference))
    return float(len(reply.text) % 3)


async def notebook(settings):
    return grpo(reward=lambda reply, end: float(len(reply.text) % 2), **settings)  # an event loop runs in a notebook


if __name__ == "__main__":
    settings = {"model": MODEL, "data": DATA, "trainer": {"device": "cpu"}, **SMALL, **ROOM}
    result = grpo(reward=reward, **settings)
    assert isinstance(result, RunResult), result
    assert CALLS, "the reward was not called"
    assert CALLS[0][1].isdigit(), CALLS[0]
    assert (result.export / "config.json").is_file(), result
    assert result.metrics["step"] == 1, result.metrics
    assert (result.run_dir / "report.html").is_file()
    ranks = grpo(reward=reward, nproc_per_node=2, **settings)
    assert ranks.metrics["step"] == 1, ranks.metrics
    cell = asyncio.run(notebook(settings))
    assert cell.metrics["step"] == 1, cell.metrics
    for wrong in ({"group_sise": 4}, {"model": "nowhere"}, {"group_size": 0}):
        try:
            grpo(**{**settings, **wrong})
        except ValueError as error:
            assert next(iter(wrong)).replace("_", "-")[:7] in str(error), error
        else:
            raise AssertionError(wrong)
    assert plan("grpo", recipe="quickstart").problems == []
    print("called", len(CALLS), "times;", sorted(result.metrics))
"""


def run(command: list[str], folder: Path) -> str:
    """Run a command away from the tree and return what it printed.

    Raises:
        AssertionError: it failed; the text has its last lines.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = {**kept, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def check(programs: Path, folder: Path) -> None:
    """Run the commands and the calls of an installed `tessera-apps`."""
    model = "runs/sft/talk/export"
    shown = run([str(programs / "tessera-grpo"), "--help"], folder)
    assert "usage: tessera-grpo" in shown, shown[:200]
    run([str(programs / "tessera-grpo"), *GRPO.split(), "--run-dir", "runs/grpo/sums"], folder)
    assert (folder / "runs/grpo/sums/export/config.json").is_file()
    small = ["--max-steps", "1", "--demonstrations", "64", "--run-dir", "runs/sft/talk"]
    run([str(programs / "tessera-sft"), *small], folder)
    assert (folder / model / "config.json").is_file()
    told = run([str(programs / "tessera-plan"), "--recipe", "quickstart"], folder)
    assert "tessera-grpo --recipe quickstart" in told, told
    assert "bazel" not in told, told
    told = run([str(programs / "tessera-plan"), "sft", "--model", model, "--data", "x.jsonl"], folder)
    assert "tessera-sft" in told, told
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "call.py").write_text(CALL)
    sys.stdout.write(run([str(programs / "python"), "call.py", model, "sums.jsonl"], folder))


if __name__ == "__main__":
    check(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
