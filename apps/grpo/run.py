"""A run of the grpo app: checks before anything starts, then training; and runs in small."""

import functools
from dataclasses import replace
from pathlib import Path

from apps.common.cli.certificates import tell_proofs, write_proofs
from apps.common.cli.extensions import tell_own_code
from apps.common.cli.refusals import Refusals
from apps.common.data.model_files import available_files
from apps.common.data.tokenizer import quiet_libraries
from apps.common.run.config_file import write_configs
from apps.common.run.forwards_ahead import agreed_ahead, tell_ahead
from apps.common.run.full_disk import writing
from apps.common.run.ranks import ensure_secret
from apps.common.run.reporter import report_on_stop
from apps.common.run.run_dir import check_run_dir, resolve_run_dir, steps_done
from apps.common.run.separate_disks import join_disks
from apps.common.shrink.command import check_nothing_dropped, print_differences
from apps.common.shrink.fields import Difference, ProcessLimit, by_flag
from apps.common.shrink.machines import supplied_to_all, tell_moved
from apps.common.shrink.npu import fake_npu_for, with_fake_npu
from apps.common.shrink.varied import LINE
from apps.grpo.config import GrpoConfig
from apps.grpo.preflight import check_machine, check_made, prepare
from apps.grpo.recipe import Recipe
from apps.grpo.registry import recipes, registered, runnable, spec_of
from apps.grpo.shrink.nodes import nodes_for
from apps.grpo.shrink.shrink import shrink, shrunk_recipe, supplied
from apps.grpo.tasks.prompt_files import data_problems
from apps.grpo.train import Result, train
from apps.grpo.vllm_defaults import settled
from engines.launch import ensure_group, launch, runs_in_this_process, under_torchrun
from engines.storage.disks import Disks, share_files
from engines.weights.hub import model_directory
from runlog import check_tracker
from runplan.run_spec import RunSpec
from schedules.runtime.collectives import broadcast_result, rank_and_world

RUNS = Path("runs/grpo")


def run(config: GrpoConfig, recipe: Recipe | None = None) -> Result:
    """Check all that can be checked, then train on the ranks that the configuration asks for.

    `recipe`: tasks, model and demonstrations; the registered one that the configuration names unless given.

    Raises:
        ValueError: model, data or settings can't be used; said before anything is sampled.
    """
    quiet_libraries()
    recipe, refusals = recipe or registered(config.recipe, config.recipe_options), Refusals()
    config = settled(config, recipe)
    refusals.of(lambda: runnable(config, recipe))
    refusals.of(lambda: check_machine(config))
    for name in config.tracker:
        refusals.of(functools.partial(check_tracker, name))
    directory, whole = refusals.of(functools.partial(available_files, config.model)) or (None, False)
    prepared = prepare(config, recipe, directory, refusals, whole) if directory else None
    refusals.of(functools.partial(check_run_dir, config.run_dir, RUNS, config.resume))
    if config.cluster.schedule.weight_sync == "shards":
        refusals.of(ensure_secret)
    if config.model is None and recipe.make_model is not None:
        if refusals.lines:
            check_made(config, recipe, refusals)
    elif directory is None:
        refusals.lines += data_problems(config)
    refusals.tell()
    if under_torchrun():
        # rank 0 makes the model and the folder, the others wait for it
        ensure_group(config.engine.device, config.engine.collective_timeout_seconds, config.stall_seconds)
    run_dir = resolve_run_dir(config.run_dir, RUNS, config.recipe, config.resume)
    with writing("what other machines have of the run", run_dir):
        disks = join_disks(run_dir, config.resume)
    if config.resume:
        steps_done(run_dir, config.steps)
    with writing("the tiny model", run_dir):
        model = _model(config, recipe, run_dir, disks).absolute()  # Ray's actors have another working directory
    if prepared is None or not whole or model != directory:
        prepared = prepare(config, recipe, model, refusals)
    refusals.tell()
    assert prepared.checked.opened is not None, "it was refused else"
    of_model = replace(config, model=model)
    engine = agreed_ahead(config.engine, prepared.checked.opened, lambda: spec_of(of_model, recipe))
    with writing("the configuration", run_dir):
        if disks.leads:
            write_configs(config, recipe.config, run_dir)
        if rank_and_world()[0] == 0:
            tell_own_code(config, run_dir)
            write_proofs(run_dir, prepared.checked.certificates, prepared.checked.accepted)
            tell_proofs(prepared.checked.certificates, config.engine.allow_untested, prepared.checked.accepted)
            tell_ahead(engine, config.engine)
    job = functools.partial(train, model=model, run_dir=run_dir, demonstrations=recipe.demonstrations)
    if runs_in_this_process(config.nproc_per_node):
        job = functools.partial(job, opened=prepared.checked.opened)
    with report_on_stop(run_dir, run_dir / "warm-start"):
        arguments = (replace(config, engine=engine), prepared.tasks)
        ranks = (config.nproc_per_node, engine.device, config.threads, engine.collective_timeout_seconds)
        result: Result = launch(job, arguments, *ranks, config.stall_seconds)
        return result


def _model(config: GrpoConfig, recipe: Recipe, run_dir: Path, disks: Disks) -> Path:
    if config.model is not None:
        return model_directory(config.model)
    assert recipe.make_model is not None
    if rank_and_world()[0] == 0:
        recipe.make_model(run_dir / "model", config.seed)
    model = broadcast_result(run_dir / "model")
    share_files(model, disks)
    return model


def shrunk(config: GrpoConfig, most: ProcessLimit) -> tuple[GrpoConfig, Recipe, tuple[Difference, ...]]:
    """Return the configuration at the size of the allowed processes, its recipe, and every field that differs.

    Raises:
        ValueError: there is no such recipe, or there are too few processes.
    """
    recipe = registered(config.recipe, config.recipe_options)
    small, differences = shrink(config, recipe, most)
    return small, shrunk_recipe(small, recipe), differences


def shrunk_spec(config: GrpoConfig, most: ProcessLimit) -> RunSpec:
    """Return the run spec of a configuration at the size of the allowed processes; see `shrunk`."""
    return with_fake_npu(spec_of(*shrunk(config, most)[:2]))


def run_shrunk(config: GrpoConfig, most: ProcessLimit) -> Result:
    """Run a recipe in small, with a tiny random model of its architecture; print the differences first.

    Raises:
        ValueError: the run would have to do without something, which the text names; or see `run`.
        IdleRunError: some weights that the run trains did not move.
    """
    if config.resume:
        raise ValueError("a shrunk run goes on without --shrink: its settings are in its folder")
    small, recipe, differences = shrunk(config, most)
    print_differences(
        config.recipe, [*by_flag(config, registered(config.recipe, config.recipe_options).config), *differences, LINE]
    )
    check_nothing_dropped(spec_of(small, recipe))
    run_dir = resolve_run_dir(config.run_dir, RUNS, f"{config.recipe}-shrunk", resume=False)
    with fake_npu_for(small.engine.device), nodes_for(small):
        result = run(supplied_to_all(lambda: supplied(small, recipe, run_dir), run_dir, small.engine, small), recipe)
    tell_moved(run_dir, small.engine)
    return result


def specs_of_recipes(most: ProcessLimit | None) -> list[tuple[RunSpec, RunSpec]]:
    """Return the run specs of all recipes, in full and at the size of the allowed processes."""
    configs = [recipe.config for recipe in recipes().values()]
    return [(spec_of(config), shrunk_spec(config, most or ProcessLimit())) for config in configs]
