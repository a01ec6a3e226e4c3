"""The commands that start a planned run, node by node: copied, they give the configuration that was planned."""

import shlex

from runplan.run_spec import RunSpec


def launch_lines(spec: RunSpec) -> list[str]:
    """Return the start commands: one for a single process or machine, torchrun on each node, or Ray's on each and one
    that starts ranks and samplers."""
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in _variables(spec))
    words = list(spec.words or ("--recipe", spec.recipe))
    nodes = spec.cluster.pools.nodes
    ahead = spec.cluster.schedule.mode != "sync"
    by_ray = _gives(words, "--launch")
    apart = spec.cluster.pools.placement == "separate" or ((ahead or by_ray) and nodes > 1)
    if apart or nodes > 1:
        words += [] if _gives(words, "--run-dir") else ["--run-dir", "RUN"]
    elif not _gives(words, "--nproc-per-node"):
        words += ["--nproc-per-node", str(spec.processes)]
    words += ["--launch", "ray"] if apart and nodes > 1 and not by_ray else []
    program = f"tessera-{spec.app}" if spec.installed else f"./bazelw run {_target(spec, words)} --"
    here = f"{variables}{program} {shlex.join(words)}"
    if apart:
        return [*_ray_lines(spec, variables), "then on HEAD:", f"RAY_ADDRESS=HEAD:6379 {here}"]
    if nodes == 1:
        return [here]
    where = f"on each node r of 0..{nodes - 1}, HEAD being node 0, with the same folder on all:"
    package = "tessera_apps.apps" if spec.installed else "apps"
    command = (
        f"{variables}torchrun --nnodes {nodes} --nproc-per-node {spec.processes} --node-rank r "
        f"--master-addr HEAD --master-port 29500 -m {package}.{spec.app}.main {shlex.join(words)}"
    )
    return [where, command]


def _variables(spec: RunSpec) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (entry.partition("=") for entry in spec.cluster.env)]


def _target(spec: RunSpec, words: list[str]) -> str:
    """Return the target that brings the packages of the sampler, and Ray."""
    ray = spec.cluster.rollout.ray_workers or _gives(words, "--launch")
    extra = spec.cluster.sampler.target or ("ray" if ray else "")
    return f"//apps/{spec.app}" + (f":{extra}" if extra else "")


def _gives(words: list[str], flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in words)


def _ray_lines(spec: RunSpec, variables: str) -> list[str]:
    pools = spec.cluster.pools
    more = pools.nodes + pools.rollout_nodes - 1
    lines = ["on the first node, HEAD:", f"{variables}ray start --head --port 6379"]
    if more:
        lines += [f"on each of {more} more nodes:", f"{variables}ray start --address HEAD:6379"]
    return lines
