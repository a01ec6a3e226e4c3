"""The commands that start a planned run, node by node: copied, they give the configuration that was planned."""

import shlex

from runplan.run_spec import RunSpec


def launch_lines(spec: RunSpec) -> list[str]:
    """Return the start commands: one for a single process or machine, torchrun on each node, or Ray for pools."""
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in _variables(spec))
    words = list(spec.words or ("--recipe", spec.recipe))
    nodes = spec.cluster.pools.nodes
    ahead = spec.cluster.schedule.mode != "sync"
    apart = spec.cluster.pools.placement == "separate" or (ahead and nodes > 1)
    if apart or nodes > 1:
        words += [] if _gives(words, "--run-dir") else ["--run-dir", "RUN"]
    elif not _gives(words, "--nproc-per-node"):
        words += ["--nproc-per-node", str(spec.processes)]
    program = f"tessera-{spec.app}" if spec.installed else f"./bazelw run {_target(spec)} --"
    here = f"{variables}{program} {shlex.join(words)}"
    if apart:
        return [*_ray_lines(spec, variables), "then on HEAD:", here]
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


def _target(spec: RunSpec) -> str:
    """Return the target that brings the packages of the sampler."""
    extra = spec.cluster.sampler.target or ("ray" if spec.cluster.rollout.ray_workers else "")
    return f"//apps/{spec.app}" + (f":{extra}" if extra else "")


def _gives(words: list[str], flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in words)


def _ray_lines(spec: RunSpec, variables: str) -> list[str]:
    pools = spec.cluster.pools
    lines = []
    for pool, nodes in (("train", pools.nodes), ("rollout", pools.rollout_nodes)):
        resources = f"--resources '{{\"{pool}\": {spec.processes}}}'"
        if pool == "train":
            lines += ["on the first training node, HEAD:", f"{variables}ray start --head --port 6379 {resources}"]
            nodes -= 1
        if nodes:
            lines += [f"on each of {nodes} more {pool} nodes:", f"{variables}ray start --address HEAD:6379 {resources}"]
    return lines
