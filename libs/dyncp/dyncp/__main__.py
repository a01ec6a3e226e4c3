"""The commands: python -m dyncp plan | view | simulate | calibrate | matrix, each with --help."""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dyncp.calibrate.machine import measure_cost, measure_links
from dyncp.exactness import matrix as exactness_matrix
from dyncp.exactness.processes import run_world
from dyncp.planning.cost import CostModel, Topology
from dyncp.planning.methods import METHODS
from dyncp.planning.planner import plan
from dyncp.planning.simulation import markdown, simulate
from dyncp.planning.sizes import LAYOUTS
from dyncp.planning.timeline import timeline_html
from dyncp.planning.types import DynamicPlan


def main(words: list[str] | None = None) -> int:
    """Run one command; return 2 for a user's error, with its text on stderr."""
    arguments = _parser().parse_args(words)
    try:
        return int(arguments.run(arguments) or 0)
    except (ValueError, OSError) as error:
        print(f"dyncp {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dyncp", description="Static and dynamic context parallelism.")
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="plan a JSON list of lengths, write the plan as JSON")
    planning.add_argument("lengths", type=Path, help="a JSON list of sequence lengths")
    planning.add_argument("--ranks", type=int, required=True)
    planning.add_argument("--align", type=int, default=1, help="each rank's tokens are padded to a multiple of it")
    planning.add_argument("--out", type=Path, help="where the plan goes; stdout otherwise")
    planning.set_defaults(run=_plan)
    view = commands.add_parser("view", help="draw a plan's timeline as one HTML page")
    view.add_argument("plan", type=Path, help="a plan as JSON")
    view.add_argument("--out", type=Path, help="the page; beside the plan otherwise")
    view.set_defaults(run=_view)
    simulating = commands.add_parser("simulate", help="replay a length trace on many ranks under the cost model")
    simulating.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    simulating.add_argument(
        "--trace", default="lognormal", help="lognormal, bimodal, uniform or a JSON list of lengths"
    )
    simulating.add_argument("--longest", type=int, default=0, help="longest sequence; 4 x cap by default")
    simulating.add_argument("--sequences-per-rank", type=int, default=8)
    simulating.add_argument("--batches", type=int, default=2)
    simulating.set_defaults(run=_simulate)
    for command in (planning, simulating):
        command.add_argument("--cap", type=int, required=True, help="tokens a rank may hold")
        command.add_argument("--method", choices=METHODS, default="ring")
        command.add_argument("--layout", choices=LAYOUTS, default="contiguous")
        command.add_argument("--cost", type=Path, help="what calibrate wrote")
        command.add_argument("--bandwidth", type=float, help="bytes a second a rank sends inside its node")
        command.add_argument("--node-bandwidth", type=float, help="and to other nodes")
        command.add_argument("--latency", type=float, help="seconds before the first byte")
    calibrate = commands.add_parser(
        "calibrate", help="measure this machine (under torchrun: its links too), one minute"
    )
    calibrate.add_argument("--config", type=Path, help="a model's config.json; a 0.7 B hybrid otherwise")
    calibrate.add_argument("--tokens", type=int, help="of one micro-batch; 8192 on a GPU, 256 on a CPU")
    calibrate.add_argument("--out", type=Path, default=Path("cost.json"))
    calibrate.set_defaults(run=_calibrate)
    matrix = commands.add_parser("matrix", help="the exactness matrix over gloo processes, as a table")
    matrix.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4])
    matrix.set_defaults(run=_matrix)
    return parser


def _cost(arguments: argparse.Namespace) -> tuple[CostModel, Topology]:
    known = json.loads(arguments.cost.read_text()) if arguments.cost else {}
    cost = CostModel.from_json(json.dumps(known["cost"])) if known else CostModel()
    topology = Topology(**known.get("topology", {}))
    values = {name: getattr(arguments, name) for name in ("bandwidth", "node_bandwidth", "latency")}
    return cost, replace(topology, **{name: value for name, value in values.items() if value is not None})


def _plan(arguments: argparse.Namespace) -> None:
    lengths = json.loads(arguments.lengths.read_text())
    cost, topology = _cost(arguments)
    made = plan(
        lengths,
        arguments.ranks,
        arguments.cap,
        cost,
        topology,
        arguments.method,
        arguments.layout,
        align=arguments.align,
    )
    if arguments.out is None:
        print(made.to_json())
        return
    arguments.out.write_text(made.to_json())
    forecast = f"{sum(made.seconds) * 1e3:.1f} ms predicted, at most {made.gap:.1%} over the fastest plan"
    print(f"{made.name}: {len(made.steps)} steps, {forecast} -> {arguments.out}")


def _view(arguments: argparse.Namespace) -> None:
    page = arguments.out or arguments.plan.with_suffix(".html")
    page.write_text(timeline_html(DynamicPlan.from_json(arguments.plan.read_text())))
    print(page)


def _simulate(arguments: argparse.Namespace) -> None:
    cost, topology = _cost(arguments)
    replays = simulate(
        arguments.ranks,
        arguments.cap,
        arguments.trace,
        arguments.sequences_per_rank,
        arguments.longest,
        arguments.batches,
        cost,
        topology,
        arguments.method,
        arguments.layout,
    )
    print(f"cap {arguments.cap}, {arguments.method}, {arguments.layout}, {asdict(topology)}\n")
    print(markdown(list(replays)))


def _calibrate(arguments: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    config = SimpleNamespace(**json.loads(arguments.config.read_text())) if arguments.config else DEFAULT_CONFIG
    topology = Topology()
    rank = int(os.environ.get("RANK", 0))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
        world = dist.group.WORLD
        assert world is not None
        topology = measure_links(world, device)
    tokens = arguments.tokens or (8192 if cuda else 256)
    cost = measure_cost(config, device, torch.bfloat16 if cuda else torch.float32, tokens)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        arguments.out.write_text(
            json.dumps({"cost": json.loads(cost.to_json()), "topology": asdict(topology)}, indent=1)
        )
        print(cost.to_json(), asdict(topology), arguments.out, sep="\n")


def _matrix(arguments: argparse.Namespace) -> int:
    results = run_world(max(arguments.sizes), exactness_matrix.run_sizes, arguments.sizes)[0]
    verdicts = [exactness_matrix.Verdict(**row) for rows in results.values() for row in rows]
    print("Largest relative difference of outputs and gradients from one process, float64\n")
    print(exactness_matrix.markdown(verdicts))
    return int(any(max(v.output_error, v.gradient_error) > exactness_matrix.TOLERANCE for v in verdicts))


DEFAULT_CONFIG = SimpleNamespace(
    model_type="qwen3_5_text",
    num_hidden_layers=8,
    hidden_size=2048,
    intermediate_size=6144,
    vocab_size=65536,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
)

if __name__ == "__main__":
    sys.exit(main())
