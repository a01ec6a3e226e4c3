"""`--launch ray` in a real Ray cluster on loopback: what ranks in actors train, how they stop, and how they fail.

Minutes, as each run starts its programs anew: `./bazelw test --config=full //apps/common:tests/ray_launch_test`.
"""

import json
import re
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from apps.common.testing.ray_launch import Command
from apps.quickstart.model import ensure_tiny_model
from rollout.workers.authentication import SECRET
from rollout.workers.ray_local import local_nodes
from schedules.ray.cluster import paths_of_children

SFT = ["apps.sft.main", "--demonstrations", "200", "--batch-size", "8", "--save-every", "2"]
GRPO = [
    *("apps.grpo.main", "--warm-start.steps", "2", "--warm-start.eval-every", "2", "--prompts-per-step", "2"),
    *("--group-size", "4", "--eval-prompts", "4", "--allow-idle-steps", "None", "--save-every", "2"),
]
SECONDS = 600


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes with two processors each."""
    with paths_of_children(), local_nodes([2.0, 2.0]) as found:
        yield found


def launched(folder: Path, address: str, words: Sequence[str]) -> Command:
    return Command([*words, "--launch", "ray"], folder, {"RAY_ADDRESS": address})


def weights(run_dir: Path) -> bytes:
    return (run_dir / "export" / "model.safetensors").read_bytes()


def ranks_of(run_dir: str) -> list[psutil.Process]:
    """Return the processes of the ranks of a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if run_dir in line and any(word.endswith("launch.rank_process") for word in line):
            found.append(process)
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def test_ranks_in_actors_train_what_spawned_ranks_train(tmp_path: Path, address: str) -> None:
    """To the bit, on one machine and on two; every line says which rank wrote it."""
    plain = Command([*SFT, "--max-steps", "4", "--nproc-per-node", "2", "--run-dir", "plain"], tmp_path)
    assert plain.wait(SECONDS) == 0, plain.text
    for number, words in enumerate(
        [["--nproc-per-node", "2"], ["--pools.nodes", "2", "--allow-untested", "nodes"]],
    ):
        name = f"run{number}"
        run = launched(tmp_path, address, [*SFT, "--max-steps", "4", *words, "--run-dir", name])
        assert run.wait(SECONDS) == 0, run.text
        assert weights(tmp_path / name) == weights(tmp_path / "plain")
        assert re.search(r"^\[rank 0\] sft 4/4 ", run.text, re.M), run.text
        assert f"ranks 0 to {1 - number} on " in run.text
    assert not ranks_of("run1")


STOPPED = {
    signal.SIGINT: (SFT, "stopped; --resume --run-dir run goes on from step"),
    signal.SIGTERM: (GRPO, "the run ends after this step, with a checkpoint"),
}


@pytest.mark.parametrize("number", STOPPED)
def test_a_signal_reaches_all_ranks_and_the_run_goes_on_later(
    tmp_path: Path, address: str, number: signal.Signals
) -> None:
    """They end as under torchrun: at Ctrl-C with the way to go on, at SIGTERM with a checkpoint of the present step."""
    words, told = STOPPED[number]
    many = [*words, "--nproc-per-node", "2", "--run-dir", "run", "--max-steps"]
    run = launched(tmp_path, address, [*many, "2000"])
    checkpoints = tmp_path / "run/checkpoints"
    run.wait_for(lambda: (checkpoints / "step-000002").exists(), SECONDS)
    assert len(ranks_of("run")) == 2
    run.send(number)
    assert run.wait(SECONDS) == 128 + number, run.text
    assert told in run.text
    assert not ranks_of("run")
    done = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-??????"))
    again = launched(tmp_path, address, [*many, str(done + 1), "--resume"])
    assert again.wait(SECONDS) == 0, again.text
    assert re.search(rf" {done + 1}/{done + 1} ", again.text), again.text


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, address: str) -> None:
    run = launched(tmp_path, address, [*SFT, "--nproc-per-node", "2", "--run-dir", "run", "--max-steps", "2000"])
    run.wait_for(lambda: (tmp_path / "run/checkpoints/step-000002").exists(), SECONDS)
    ranks_of("run")[1].kill()
    assert run.wait(SECONDS) == 128 + signal.SIGKILL, run.text
    assert re.search(r"rank 1 on \S+ \(127\.0\.0\.1\) was ended by SIGKILL; its last words:", run.text)
    assert not ranks_of("run")


def test_a_stopped_rank_is_named_and_ends_the_others(tmp_path: Path, address: str) -> None:
    many = [*GRPO, "--nproc-per-node", "2", "--run-dir", "run", "--max-steps", "2000", "--stall-seconds", "10"]
    run = launched(tmp_path, address, many)
    run.wait_for(lambda: (tmp_path / "run/checkpoints/step-000002").exists(), SECONDS)
    stopped = ranks_of("run")[1]
    stopped.suspend()
    assert run.wait(120) == 128 + signal.SIGKILL, run.text
    told = rf"\[rank 0\] rank 1 \(process {stopped.pid} on \S+\) said nothing for 10 s, as rank 0 noticed: the run ends"
    assert re.search(told, run.text), run.text
    assert re.search(r"rank 1 on \S+ \(127\.0\.0\.1\) was ended by SIGKILL; its last words:", run.text), run.text
    assert (tmp_path / "run/report.html").exists()
    assert not ranks_of("run")


def test_a_killed_command_leaves_no_rank_behind(tmp_path: Path, address: str) -> None:
    run = launched(tmp_path, address, [*SFT, "--nproc-per-node", "2", "--run-dir", "run", "--max-steps", "2000"])
    run.wait_for(lambda: len(ranks_of("run")) == 2, SECONDS)
    run.send(signal.SIGKILL)
    run.wait(SECONDS)
    end = time.monotonic() + SECONDS
    while ranks_of("run"):
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_users_error_has_its_own_status(tmp_path: Path, address: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=?"}\n')
    run = launched(tmp_path, address, ["apps.sft.main", "--model", "none", "--data", "rows.jsonl"])
    assert run.wait(SECONDS) == 2, run.text
    assert "[rank 0] error:" in run.text
    assert not list((tmp_path / "runs").glob("*/*/config.json"))


def test_a_demand_beyond_the_cluster_starts_nothing(tmp_path: Path, address: str) -> None:
    for words, told in [
        (["--nproc-per-node", "3"], "1 machines of 3 ranks need 3 CPU each, and 0 of the Ray cluster's 2 machines"),
        (["--pools.nodes", "3"], "3 machines of 1 ranks need 1 CPU each, and 2 of the Ray cluster's 2"),
        (["--trainer.device", "cuda"], "1 CPU and 1 GPU each, and 0 of"),
    ]:
        run = launched(tmp_path, address, [*SFT, *words, "--allow-untested", "nodes"])
        assert run.wait(SECONDS) == 2, run.text
        assert told in run.text
    samplers = ["apps.grpo.main", "--rollout.ray-workers", "4"]
    run = launched(tmp_path, address, samplers)
    assert run.wait(SECONDS) == 2, run.text
    assert "beside 1 ranks of 1 CPU each, 4 samplers of 1 CPU each find 3 places on 2 nodes" in run.text
    assert not (tmp_path / "runs").exists()


def test_one_command_starts_and_ends_a_cluster_of_its_own(tmp_path: Path) -> None:
    """On loopback; nothing listens and nothing runs after it."""
    run = Command([*SFT, "--max-steps", "2000", "--run-dir", "run", "--launch", "ray"], tmp_path)
    run.wait_for(lambda: (tmp_path / "run/checkpoints/step-000002").exists(), SECONDS)
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    places = {
        each.laddr.ip.removeprefix("::ffff:")
        for process in [*family, *ranks_of("run")]
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert places == {"127.0.0.1"}
    run.send(signal.SIGINT)
    assert run.wait(SECONDS) == 130, run.text
    assert not psutil.wait_procs(family, timeout=30)[1]


OTHER = """import os
if os.environ.get("RANK") == "1":
    os.environ["TESSERA_GROUP_SECRET"] = "f" * 64
def reward(reply, reference):
    return 0.0
"""
"""Code of a user's that gives a rank another secret."""
SHARDS = ["--schedule.weight-sync", "shards", "--nproc-per-node", "2", "--rollout.ray-workers", "1"]


def test_ranks_authenticate_by_the_launcher_s_secret_which_nothing_tells(tmp_path: Path, address: str) -> None:
    """They send shards straight to a sampler; its own log, Ray's, the run's folder and the output lack the secret."""
    secret = secrets.token_hex(32)
    words = [*GRPO, *SHARDS, "--max-steps", "1", "--run-dir", "run", "--launch", "ray"]
    run = Command(words, tmp_path, {"RAY_ADDRESS": address, SECRET: secret})
    assert run.wait(SECONDS) == 0, run.text
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert row["weights/version"] == 1
    assert secret not in run.text
    places = [tmp_path / "run", *logs_of_ray()]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert len(places) > 1
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def logs_of_ray() -> set[Path]:
    """Return the folders of the logs of Ray's daemons that this process started."""
    words = [word for each in psutil.Process().children(recursive=True) for word in each.cmdline()]
    found = {word.partition("=")[2] for word in words if re.match(r"--(log[-_]dir|session[-_]dir)=", word)}
    return {Path(name) for name in found if name}


def test_a_rank_with_another_secret_gets_and_gives_no_weights(tmp_path: Path, address: str) -> None:
    (tmp_path / "own.py").write_text(OTHER)
    ensure_tiny_model(tmp_path / "model", 0)
    rows = [{"question": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["apps.grpo.main", "--model", "model", "--data", "rows.jsonl", "--reward", "own.py:reward", *SHARDS]
    words += ["--max-steps", "1", "--prompts-per-step", "2", "--group-size", "4", "--eval-prompts", "4"]
    words += ["--sampling.max-new-tokens", "8", "--max-episode-tokens", "2048", "--run-dir", "run"]
    run = launched(tmp_path, address, words)
    assert run.wait(SECONDS) != 0, run.text
    assert "process 1 of 2 does not know the run's secret" in run.text


def test_samplers_join_the_cluster_of_the_ranks(tmp_path: Path, address: str) -> None:
    """Two ranks and two samplers, one command."""
    words = [*GRPO, "--max-steps", "1", "--nproc-per-node", "2", "--rollout.ray-workers", "2"]
    words += ["--schedule.mode", "one_step_off", "--run-dir", "run"]
    run = launched(tmp_path, address, words)
    assert run.wait(SECONDS) == 0, run.text
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert (row["step"], row["weights/version"]) == (1, 1)
