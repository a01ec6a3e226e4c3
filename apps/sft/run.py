"""A run of the sft app: checks before anything starts, then training; and runs in small."""

import glob
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.cli.certificates import tell_proofs, write_proofs
from apps.common.cli.extensions import tell_own_code
from apps.common.cli.refusals import Refusals
from apps.common.data.images import image_processor_of
from apps.common.data.model_files import available_files
from apps.common.data.tokenizer import quiet_libraries
from apps.common.run.config_file import write_configs
from apps.common.run.forwards_ahead import agreed_ahead, tell_ahead
from apps.common.run.full_disk import writing
from apps.common.run.reporter import report_on_stop
from apps.common.run.run_dir import check_run_dir, resolve_run_dir, steps_done
from apps.common.run.separate_disks import join_disks
from apps.common.shrink.command import check_nothing_dropped, print_differences
from apps.common.shrink.fields import Difference, ProcessLimit, by_flag
from apps.common.shrink.machines import supplied_to_all, tell_moved
from apps.common.shrink.npu import fake_npu_for, with_fake_npu
from apps.quickstart.model import ensure_tiny_model
from apps.sft.config import SftConfig
from apps.sft.data import Conversations, load_conversations, write_demonstrations
from apps.sft.data_files import data_problems
from apps.sft.preflight import check_made, check_model, prepare
from apps.sft.reading.samples import stop_tokens_of
from apps.sft.reading.sources import Source
from apps.sft.reading.tokenized import silent
from apps.sft.recipe import Recipe
from apps.sft.registry import recipes, registered, runnable, spec_of
from apps.sft.row_order import check_row_order, row_order
from apps.sft.shrink import shrink, shrunk_recipe, supplied
from apps.sft.step_plan import plan_steps, warnings_of
from apps.sft.train import Result, train
from engines.launch import ensure_group, launch, runs_in_this_process, under_torchrun
from engines.loading import resolve_device
from engines.storage.disks import Disks, find_disks, share_files
from engines.weights.hub import model_directory
from runlog import check_tracker
from runplan.run_spec import RunSpec
from schedules.runtime.collectives import broadcast_result, gather_lists, rank_and_world

RUNS = Path("runs/sft")


def run(config: SftConfig, recipe: Recipe | None = None) -> Result:
    """Check all that can be checked, then train on the ranks that the configuration asks for.

    `recipe`: the registered one that the configuration names unless given.

    Raises:
        ValueError: model, data or settings can't be used; said before any training.
        DivergenceError, engines.NonFiniteError: the run diverged; it has no export.
    """
    quiet_libraries()
    refusals = Refusals()
    refusals.of(lambda: runnable(config, recipe))
    refusals.of(lambda: resolve_device(config.engine))
    for name in config.tracker:
        refusals.of(partial(check_tracker, name))
    directory, whole = refusals.of(partial(available_files, config.model)) or (None, False)
    prepared = prepare(config, recipe, directory, refusals, whole) if directory else None
    refusals.of(partial(check_run_dir, config.run_dir, RUNS, config.resume))
    if config.model is None and refusals.lines:
        check_made(config, recipe, refusals)
    refusals.lines += data_problems(config.data, rows=bool(refusals.lines))
    refusals.tell()
    if under_torchrun():
        # rank 0 makes the model and the folder, the others wait for it
        ensure_group(config.engine.device, config.engine.collective_timeout_seconds, config.stall_seconds)
    run_dir = resolve_run_dir(config.run_dir, RUNS, config.recipe, config.resume)
    with writing("what other machines have of the run", run_dir):
        disks = join_disks(run_dir, config.resume)
    if config.resume and config.epochs is None:
        steps_done(run_dir, config.steps)
    with writing("the tiny model or the demonstrations", run_dir):
        model, sources = _model(config, run_dir, disks), _sources(config, run_dir, disks)
    if prepared is None or not whole or model != directory:
        prepared = prepare(config, recipe, model, refusals)
    refusals.tell()
    opened, tokenizer = prepared.checked.opened, prepared.tokenizer
    assert opened is not None
    assert tokenizer is not None
    conversations = _conversations(config, sources, model, tokenizer, run_dir)
    check_model(conversations, model, opened.config, tokenizer)
    plan = plan_steps(config, conversations)
    if config.resume and (checkpoint := steps_done(run_dir, plan.steps)[1]) is not None:
        check_row_order(checkpoint, row_order(config, conversations), run_dir)
    of_model = replace(config, model=model)
    engine = agreed_ahead(config.engine, opened, lambda: spec_of(of_model, recipe))
    with writing("the configuration", run_dir):
        if disks.leads:
            write_configs(config, (recipe or registered(config.recipe, config.recipe_options)).config, run_dir)
        if rank_and_world()[0] == 0:
            tell_own_code(config, run_dir)
            write_proofs(run_dir, prepared.checked.certificates, prepared.checked.accepted)
            tell_proofs(prepared.checked.certificates, config.engine.allow_untested, prepared.checked.accepted)
            tell_ahead(engine, config.engine)
            sys.stdout.writelines(f"warning: {line}\n" for line in warnings_of(config, plan, conversations))
    with report_on_stop(run_dir):
        given = opened if runs_in_this_process(config.nproc_per_node) else None
        job = (replace(config, engine=engine), conversations, model, run_dir, given)
        ranks = (config.nproc_per_node, engine.device, config.threads, engine.collective_timeout_seconds)
        result: Result = launch(train, job, *ranks, config.stall_seconds)
        return result


def shrunk(config: SftConfig, most: ProcessLimit) -> tuple[SftConfig, Recipe, tuple[Difference, ...]]:
    """Return the configuration at the size of the allowed processes, its recipe, and every field that differs.

    Raises:
        ValueError: there is no such recipe, or there are too few processes.
    """
    recipe = registered(config.recipe, config.recipe_options)
    small, differences = shrink(config, recipe, most)
    return small, shrunk_recipe(small, recipe), differences


def shrunk_spec(config: SftConfig, most: ProcessLimit) -> RunSpec:
    """Return the run spec of a configuration at the size of the allowed processes; see `shrunk`."""
    return with_fake_npu(spec_of(*shrunk(config, most)[:2]))


def run_shrunk(config: SftConfig, most: ProcessLimit) -> Result:
    """Run a recipe in small, with a tiny random model of its architecture; print the differences first.

    Raises:
        ValueError: the run would have to do without something, which the text names; or see `run`.
        IdleRunError: some weights that the run trains did not move.
    """
    if config.resume:
        raise ValueError("a shrunk run goes on without --shrink: its settings are in its folder")
    small, recipe, differences = shrunk(config, most)
    print_differences(
        config.recipe, [*by_flag(config, registered(config.recipe, config.recipe_options).config), *differences]
    )
    check_nothing_dropped(spec_of(small, recipe))
    run_dir = resolve_run_dir(config.run_dir, RUNS, f"{config.recipe}-shrunk", resume=False)
    with fake_npu_for(small.engine.device):
        result = run(supplied_to_all(lambda: supplied(small, recipe, run_dir), run_dir, small.engine, small), recipe)
    tell_moved(run_dir, small.engine)
    return result


def _model(config: SftConfig, run_dir: Path, disks: Disks) -> Path:
    if config.model is not None:
        return model_directory(config.model)
    if rank_and_world()[0] == 0:
        ensure_tiny_model(run_dir / "model", config.seed)
    model = broadcast_result(run_dir / "model")
    share_files(model, disks)
    return model


def _sources(config: SftConfig, run_dir: Path, disks: Disks) -> tuple[Source, ...]:
    if config.data.data:
        return config.data.sources
    path = run_dir / "demonstrations.jsonl"
    if rank_and_world()[0] == 0 and not path.is_file():
        write_demonstrations(config.data, config.seed, path)
    path = broadcast_result(path)
    share_files(path.parent, disks, path.name)
    return (Source(path),)


def _conversations(
    config: SftConfig, sources: Sequence[Source], model: Path, tokenizer: PreTrainedTokenizerBase, run_dir: Path
) -> Conversations:
    """Tokenise on rank 0; load the result on the other ranks, whose disks get it."""
    cache = config.data.cache_dir or run_dir.absolute().parent / "tokens"
    stops, pictures = stop_tokens_of(model, tokenizer), image_processor_of(config.engine, model)
    column = config.cluster.media.images_column

    def load() -> Conversations:
        log_line = print if rank_and_world()[0] == 0 else silent
        return load_conversations(config.data, sources, tokenizer, stops, cache, pictures, column, log_line)

    with writing(f"the tokens of {', '.join(str(source.path) for source in sources)}", cache, run_dir):
        conversations = load() if rank_and_world()[0] == 0 else None
        _share_tokens(conversations, cache)
        return conversations or load()


def _share_tokens(conversations: Conversations | None, folder: Path) -> None:
    """Give each disk the tokenised files of rank 0, which has loaded them; collective."""
    loaded = (*conversations.train.files, *conversations.held_out.files) if conversations else ()
    names = broadcast_result(sorted({store.path.name for store, _, _ in loaded}))
    disks = find_disks(folder)
    for name in names if disks.several else ():
        if not all(gather_lists([(folder / name).is_file()])):
            share_files(folder, disks, glob.escape(name))


def specs_of_recipes(most: ProcessLimit | None) -> list[tuple[RunSpec, RunSpec]]:
    """Return the run specs of all recipes, in full and at the size of the allowed processes."""
    configs = [recipe.config for recipe in recipes().values()]
    return [(spec_of(config), shrunk_spec(config, most or ProcessLimit())) for config in configs]
