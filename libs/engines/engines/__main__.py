"""`python -m engines COMMAND`: the tables that hold what the engines claim.

families: each model family against transformers. checkpoints: runs that are resumed, by as many ranks and by others.
megatron: each layout of Megatron's ranks against one process (it needs megatron-core). capabilities: what each backend
can do, and the test that shows it. prove DIR: the certificate of a model directory's config, printed as JSON: in small,
with --prove full one layer of each kind at true width and true lengths on this machine's device (minutes on a CPU),
with --engine.NAME VALUE ... or --ranks N that of these options on ranks (of the CPU; with --prove full and --ranks of
this machine's devices). prove --all: the tables of all types of transformers, for docs/certificates.md and the README.
prove --published: the configs of published checkpoints. warm-kernels DIR [--engine.NAME VALUE ...]: compile what a run
of these options compiles, so that it finds it on disk.
"""

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "capabilities": "engines.capability_table",
    "families": "engines.proofs.family_conformance",
    "checkpoints": "engines.proofs.checkpoint_matrix",
    "megatron": "engines.proofs.megatron_table",
}


def main() -> int:
    """Run a command of the library; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m engines", description=__doc__)
    parser.add_argument("command", choices=[*COMMANDS, "prove", "warm-kernels"])
    parser.add_argument("model", nargs="?", help="prove, warm-kernels: a model directory, or OWNER/NAME in the cache")
    parser.add_argument("--ranks", type=int, help="prove: number of the run's ranks")
    parser.add_argument("--longest", type=int, default=0, help="prove --prove full: tokens of the run's longest row")
    parser.add_argument("--prove", choices=["small", "full"], default="small", help="prove: widths and lengths")
    parser.add_argument(
        "--all", nargs="*", metavar="TYPE", help="prove: all types, or these anew, and write the tables"
    )
    parser.add_argument(
        "--published",
        nargs="*",
        metavar="NAME",
        help="prove: configs of published checkpoints, and write their figures",
    )
    parser.add_argument("--docs", default="docs", help="prove --all, --published: the folder of certificates.md")
    arguments, options = parser.parse_known_args()
    if arguments.command == "prove":
        from engines.prove_command import main as prove  # torch and transformers

        return prove(parser, arguments, options)
    given = [name for name, value in vars(arguments).items() if name != "command" and value != parser.get_default(name)]
    if arguments.command == "warm-kernels":
        from engines.prove_command import warm  # torch and transformers

        if given != ["model"]:
            parser.error("warm-kernels takes a model directory, and --engine.NAME VALUE ...")
        return warm(parser, arguments.model, options)
    if options or given:
        parser.error(f"{arguments.command} takes no {options[0] if options else f'--{given[0]}'}")
    status: int = import_module(COMMANDS[arguments.command]).main()
    return status


if __name__ == "__main__":
    sys.exit(main())
