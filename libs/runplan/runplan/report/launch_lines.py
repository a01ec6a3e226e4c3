"""The commands that start a planned run, node by node."""

from runplan.run_spec import RunSpec


def launch_lines(spec: RunSpec) -> list[str]:
    """Return the start commands: one for a single process or machine, torchrun on each node, or Ray for pools."""
    variables = "".join(f"{entry} " for entry in spec.cluster.env)
    flags = f"--recipe {spec.recipe}" + (" --model DIR --data FILE" if spec.needs_model else "")
    nodes = spec.cluster.pools.nodes
    ahead = spec.cluster.schedule.mode != "sync"
    if spec.cluster.pools.placement == "separate" or (ahead and nodes > 1):
        return _ray_lines(spec, variables, flags)
    if nodes == 1:
        return [f"{variables}bazel run //apps/{spec.app} -- {flags} --nproc-per-node {spec.processes}"]
    where = f"on each node r of 0..{nodes - 1}, HEAD being node 0, with the same folder on all:"
    command = (
        f"{variables}torchrun --nnodes {nodes} --nproc-per-node {spec.processes} --node-rank r "
        f"--master-addr HEAD --master-port 29500 -m apps.{spec.app}.main {flags} --run-dir RUN"
    )
    return [where, command]


def _ray_lines(spec: RunSpec, variables: str, flags: str) -> list[str]:
    pools = spec.cluster.pools
    lines = []
    for pool, nodes in (("train", pools.nodes), ("rollout", pools.rollout_nodes)):
        resources = f"--resources '{{\"{pool}\": {spec.processes}}}'"
        if pool == "train":
            lines += ["on the first training node, HEAD:", f"{variables}ray start --head --port 6379 {resources}"]
            nodes -= 1
        if nodes:
            lines += [f"on each of {nodes} more {pool} nodes:", f"{variables}ray start --address HEAD:6379 {resources}"]
    return [*lines, "then on HEAD:", f"{variables}bazel run //apps/{spec.app} -- {flags} --run-dir RUN"]
