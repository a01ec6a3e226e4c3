"""vLLM's own engine, driven step by step in this process.

vLLM's asynchronous engine always puts its core into a further process, which outlives a killed parent; this process
exists for vLLM alone, so its core runs in it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from typing import Any

import vllm
from vllm import EngineArgs, SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from rollout.vllm.limits.cpu import arguments_refusal, refusal
from rollout.vllm.limits.parallel_limits import nodes_refusal, spread_refusal, stages_refusal
from rollout.vllm.server import cpu_replicas as cpu_copies
from rollout.vllm.server.ascend import installed
from rollout.vllm.server.grammars import RequestGrammars
from rollout.vllm.server.platforms import settle
from rollout.vllm.server.routes import RequestExperts
from rollout.vllm.server.text_models import register_text_models
from rollout.vllm.server.weight_regions import REGIONS
from rollout.vllm.settings.arguments import EngineArguments, check_arguments

TokenUpdate = tuple[Any, ...]
"""A request's number, the tokens of this step, their log-probs, why it ended, and at its end the experts of all its
tokens where they are recorded; then (token, log-prob) pairs at each token of its prompt where they were asked for."""

RELOAD_INPLACE = "vllm.model_executor.model_loader.reload.inplace"
"""The module by which the weights of a model that drafts are replaced (`worker`)."""
UNTIED = {"tie_word_embeddings": False}


class Generator:
    """Requests in, tokens out, one step at a time.

    Args:
        start: `model` (a directory), `config` (the text part of its config.json), `engine` (arguments of vLLM's),
            `weights` (slots of a file of weights, see `rollout.vllm.weights.shared_weights`),
            `regions` (paths of this machine's two such files where workers are on several machines, or none),
            `tied` (other names of some of them), `experts` (whether the experts of tokens are recorded),
            `sight` (the model's vision settings, or None),
            `together` (which of the copies that share experts this is, see `cpu_replicas`; or None).

    Raises:
        ValueError: vLLM can't do what is asked; the text says why.
    """

    def __init__(self, start: dict[str, Any]) -> None:
        arguments, together = read_arguments(start), start["together"]
        self._vision_spec = start["vision_spec"]
        self._engine = LLMEngine.from_engine_args(arguments)
        self._engine.collective_rpc("settle_in")
        self._own_experts: list[list[int]] = []
        self.turns = None if together is None else self._join_copies()
        self._slots, self._tied, self._regions = start["weights"], start["tied"], start["regions"]
        self._prefix_cache = arguments.enable_prefix_caching
        self._names: dict[int, str] = {}
        self._grammars = RequestGrammars(self._engine)
        self.failures: list[tuple[int, str]] = []
        """Requests that ended in an error since they were last taken, and its text."""
        if self._vision_spec is not None:
            self._check_sight()
        self._experts = RequestExperts() if start["experts"] else None
        if self._experts is not None:
            self._engine.collective_rpc("note_experts")

    def model_info(self) -> dict[str, Any]:
        """Return facts on the engine: versions, device, sizes, workers."""
        model = self._engine.vllm_config.model_config
        return {
            "vllm": vllm.__version__,
            "device": device_kind(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_length": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "workers": [worker.pid for worker in self.workers],
            "experts": self._own_experts,
            "overlaps": bool(self._engine.vllm_config.scheduler_config.async_scheduling),
            "ends": self._grammars.ends,
        }

    @property
    def workers(self) -> list[BaseProcess]:
        """The worker processes of the model; none where it is in this one."""
        return [worker.proc for worker in getattr(self._engine.model_executor, "workers", ())]

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._engine.get_num_unfinished_requests())

    def _join_copies(self) -> cpu_copies.LockstepTurns:
        """Replace the engine's step: make a dummy one where the other copies, which wait at each layer's experts, make
        a real one. Only this engine changes, not vLLM's classes."""
        self._own_experts = self._engine.collective_rpc("join_copies")
        core = self._engine.engine_core.engine_core
        own_step = core.step_fn

        def step() -> tuple[Any, bool]:
            outputs, computed = own_step()
            if not computed:
                core.execute_dummy_batch()
                if self._experts is not None:
                    self._engine.collective_rpc("take_experts")  # and drop them: they are of dummy tokens
            return outputs, computed

        core.step_fn = step
        return cpu_copies.LockstepTurns(self._engine.dp_group)

    def _check_sight(self) -> None:
        for spec in self._engine.collective_rpc("report_vision"):
            if spec != self._vision_spec:
                raise ValueError(f"vLLM's model sees by {spec}, the trainer's by {self._vision_spec}")

    def _prompt(self, ids: list[int], shown: Sequence[Any], places: list[int], positions: str) -> Any:
        """Return a prompt with images. Raise ValueError where vLLM's positions differ from the trainer's."""
        grids = [one.grid for one in shown]
        if set(self._engine.collective_rpc("digest_positions", args=(ids, grids, places))) != {positions}:
            raise ValueError(f"vLLM gives the tokens of images of the grids {grids} other positions than the trainer")
        # It takes names of vLLM that not every release has.
        from rollout.vllm.server.images import seen_prompt

        return seen_prompt(ids, shown, places, self._vision_spec["merge_size"])

    def add(
        self,
        number: int,
        ids: list[int],
        sampling: dict[str, Any],
        shown: Sequence[Any] = (),
        places: Sequence[int] = (),
        positions: str = "",
    ) -> None:
        """Add a request. Raise ValueError where vLLM refuses it."""
        prompt = self._prompt(ids, shown, list(places), positions) if shown else {"prompt_token_ids": ids}
        wanted = sampling.pop("structured_outputs", None)
        params = SamplingParams(
            **sampling,
            structured_outputs=None if wanted is None else self._grammars.params(wanted),
            logprobs=0,
            detokenize=False,
            ignore_eos=True,  # only the request's own stop tokens end it
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )
        name = self._engine.add_request(str(number), prompt, params)
        if wanted is not None:
            self._grammars.begin(name, ids, wanted)
        self._names[number] = name

    def end(self, number: int) -> TokenUpdate | None:
        """End a request and return its last update; None where it has ended before."""
        name = self._names.pop(number, None)
        if name is None:
            return None
        self._engine.abort_request([name], internal=True)
        self._grammars.end(name)
        return number, [], [], "abort", self._experts_of(name)

    def _experts_of(self, name: str) -> list[Any] | None:
        experts = None if self._experts is None else self._experts.take(name)
        return None if experts is None else experts.plain()

    def step(self) -> list[TokenUpdate]:
        """Run one step of vLLM and return the update of each request."""
        updates: list[TokenUpdate] = []
        outputs = self._engine.step()
        if self._experts is not None:
            self._experts.note(self._engine.collective_rpc("take_experts")[0])
        for output in outputs:
            number, answer = int(output.request_id), output.outputs[0]
            ids = list(answer.token_ids)
            log_probs = [row[token].logprob for token, row in zip(ids, answer.logprobs or (), strict=True)]
            name = self._names.pop(number, None) if output.finished else None
            if name is not None and (why := self._grammars.end(name)):
                self.failures.append((number, f"the grammar of a structured output gave up: {why}"))
                continue
            experts = None if name is None else self._experts_of(name)
            prompt = [] if output.prompt_logprobs is None else [_pairs(output.prompt_logprobs)]
            updates.append((number, ids, log_probs, answer.finish_reason, experts, *prompt))
        return updates

    def drain(self) -> list[TokenUpdate]:
        """Finish the step that overlaps with the next one, where one does, and begin none; return its updates.

        Whatever replaces weights or frees memory calls it first: all tokens of a step are then of one version.
        """
        core = self._engine.engine_core.engine_core
        updates: list[TokenUpdate] = []
        if core.batch_queue:
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while core.batch_queue:
                updates += self.step()
            core.scheduler.set_pause_state(PauseState.UNPAUSED)
        return updates

    def sleep(self) -> None:
        """Free the memory of weights and caches; nothing may run. The weights are read again after `wake`."""
        self._engine.sleep(level=2)

    def wake(self) -> None:
        """Allocate the memory again. Its contents are undefined until weights are loaded."""
        self._engine.wake_up()

    def _seen_by_workers(self, path: str | dict[str, Any]) -> str | int | dict[str, Any]:
        """Return the path of a descriptor of this process for its children; its number for those of several machines,
        each of which has regions of its own."""
        if isinstance(path, dict):
            return path
        return self._regions.index(path) if self._regions else seen_by_children(path)

    def load(self, path: str | dict[str, Any], digests: dict[str, int], recompute: bool) -> None:
        """Load the weights of a file, or of parts (`rollout.vllm.weights.parts`), and check the digest of each.

        The prefix cache is stale then, and dropped; with `recompute` running requests read their tokens again too.

        Raises:
            RuntimeError: the file is damaged, or vLLM left a parameter as it was, in one of its workers.
        """
        answers = self._engine.collective_rpc(
            "load_file", args=(self._seen_by_workers(path), self._slots, self._tied, digests)
        )
        if problems := [f"{_worker(rank, answers)}{why}" for rank, why in enumerate(answers) if why is not None]:
            raise RuntimeError("; ".join(problems))
        if (self._prefix_cache or recompute) and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM keeps what older weights computed of its prompts")
        if self._vision_spec is not None:
            self._engine.reset_encoder_cache()  # outputs of the older tower


def read_arguments(start: dict[str, Any]) -> EngineArgs:
    """Return vLLM's engine arguments, and set the variables of this process and its workers by them.

    Raises:
        ValueError: vLLM can't do what is asked; the text says why.
    """
    arguments = start["engine"]
    known = EngineArguments(vllm.__version__, tuple(field.name for field in fields(EngineArgs)))
    check_arguments(arguments, known)
    together = start["together"]
    sees = start["vision_spec"] is not None
    if why := _refusal(start["config"], arguments, together, sees):
        raise ValueError(f"vLLM can't sample from {arguments['model']}: {why}")
    flashinfer = find_spec("flashinfer") is not None
    arguments, variables = settle(device_kind(), arguments, os.environ, together, installed(), flashinfer)
    if start["experts"]:
        arguments["async_scheduling"] = False  # a step's experts are asked for before the next one begins
    os.environ |= variables  # its workers' too
    os.environ[REGIONS] = json.dumps([seen_by_children(path) for path in start["regions"]])
    register_text_models()
    seeing = {}
    if sees:
        from rollout.vllm.server import images  # a text model needs none of its imports

        images.replace_processors()
        os.environ["TESSERA_VLLM_SEEING"] = "1"  # its workers do so too (`start`)
        seeing = images.arguments(known.names)
    return EngineArgs(
        **(seeing | arguments),
        load_format="dummy",
        hf_overrides=UNTIED | {"text_config": UNTIED} if sees else UNTIED,
        worker_extension_cls="rollout.vllm.server.worker.FileWeights",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        skip_tokenizer_init="tokenizer" not in arguments,
        structured_outputs_config=StructuredOutputsConfig(backend="guidance"),
        disable_log_stats=True,
    )


def _refusal(
    config: Mapping[str, Any], arguments: Mapping[str, Any], together: Mapping[str, int] | None, sees: bool
) -> str | None:
    cpu = current_platform.is_cpu()
    if cpu and (why := refusal(config, arguments["dtype"])):
        return why
    if cpu and (why := arguments_refusal(arguments, arguments["dtype"])):
        return why
    method = (arguments.get("speculative_config") or {}).get("method")
    if method == "mtp" and find_spec(RELOAD_INPLACE) is None:
        return (
            f"speculative_config of method mtp: vLLM {vllm.__version__} can't give new weights to the head that drafts "
            "(0.26 told log-probs 3 off or NaN): take 0.32, or leave speculative_config out"
        )
    if together is not None and (why := cpu_copies.refusal(vllm.__version__, cpu)):
        return why
    stages = arguments["pipeline_parallel_size"]
    if why := stages_refusal(config, stages, cpu, sees):
        return why
    if why := nodes_refusal(stages * arguments["tensor_parallel_size"], arguments.get("nnodes", 1), cpu):
        return why
    workers, copies = arguments["tensor_parallel_size"], 1 if together is None else together["size"]
    return spread_refusal(config, workers, arguments["enable_expert_parallel"], cpu, copies)


def _pairs(rows: Sequence[Mapping[int, Any] | None]) -> list[list[tuple[int, float]]]:
    return [[(token, one.logprob) for token, one in (row or {}).items()] for row in rows]


def _worker(rank: int, answers: Sequence[Any]) -> str:
    return f"worker {rank} of {len(answers)}: " if len(answers) > 1 else ""


def device_kind() -> str:
    """Return the kind of device that this vLLM computes on: "cpu", "cuda", "npu", ..."""
    return "cpu" if current_platform.is_cpu() else current_platform.device_type


def seen_by_children(path: str) -> str:
    """Return the path of a descriptor of this process for its children."""
    return path.replace("/proc/self/fd/", f"/proc/{os.getpid()}/fd/")
