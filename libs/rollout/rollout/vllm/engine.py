"""The vLLM engine: the rollout protocol here, vLLM in a process of its own.

1. A request goes over the socket as numbers, its tokens come back step by step, with the version of the weights that
   sampled them.
2. Weights are staged where all processes see them; after a commit vLLM reads them between two of its steps.
3. A process ends when its socket does, so that a killed parent leaves nothing behind; when one dies, its requests fail
   with its last output. Copies of the model are processes of their own (`rollout.vllm.client.replicas`).
"""

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollout.capability import feature_of
from rollout.config import RolloutConfig
from rollout.engine import Completion, Load, OnTokens, PauseMode, Sampling, check_request
from rollout.errors import EpisodeFailed
from rollout.node_place import place_of
from rollout.open_requests import OpenRequests, check_pause
from rollout.structured_outputs import NO_TOKENIZER
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, Piece
from rollout.sync.rate import copy_rate
from rollout.token_scores import TokenScores, check_scored, scores_of_rows
from rollout.vllm.client.images import shown_in, vision_spec_of
from rollout.vllm.client.replicas import Replicas
from rollout.vllm.client.requests import PROMPT_LOGPROBS, VllmRequest, VllmRequests, check_structured
from rollout.vllm.client.start import EngineStart
from rollout.vllm.limits.capability import VLLM
from rollout.vllm.limits.cpu import prompt_refusal
from rollout.vllm.settings.config import VllmConfig, numeric_settings, text_config
from rollout.vllm.weights.drafts import draft_refusal
from rollout.vllm.weights.parts import PartsBucket, layout_of
from rollout.vllm.weights.shared_weights import SharedWeights, Transfer, checkpoint_shapes, tied_head
from seqpack.capability import Supported, Unsupported

log = logging.getLogger(__name__)


class VllmEngine:
    """An engine that samples through vLLM from the model of a Hugging Face directory.

    Args:
        model: the directory: config.json, and safetensors files with the first weights.
        config: the settings; its `vllm` says where vLLM is and how it is started.
        version: the version of the weights in the directory.
        wait: whether to wait until vLLM is ready; else its processes begin, and `wait_until_ready` waits before its
            first use.

    Raises:
        ValueError: there is no vLLM, or it can't do what is asked; the text says why.
        RuntimeError: its process died before it was ready, or did not answer its first prompt; with its last output.
    """

    def __init__(self, model: Path, config: RolloutConfig, version: int = 0, wait: bool = True) -> None:
        described = self._described = text_config(model)
        tied = tied_head(model, described)
        self.part_layout = layout_of(described, config.vllm)
        self._vision_spec = vision_spec_of(model)
        self._config = config
        self._place = place_of(config.vllm.nodes)
        self._seeds = random.Random(config.seed)
        self._numbers = itertools.count()
        self._requests = VllmRequests(self._send, config.vllm.data_parallel)
        self._open = OpenRequests(self._requests.end)
        self._lost: RuntimeError | None = None
        self._closed = self._asleep = self._unread = False
        self._staged_s = 0.0
        self.transfer: Transfer | None = None
        shapes = checkpoint_shapes(model)
        if why := draft_refusal(config.vllm.arguments, shapes):
            raise ValueError(why)
        self._weights = SharedWeights(shapes, tied, version, config.vllm.weights_on_device)
        self._replicas = Replicas(config.vllm, self._weights.inherited)
        self._info: dict[str, Any] = {}
        begun = False
        try:
            of_model = (model, config, described, tied, self._vision_spec)
            self._starting = EngineStart(*of_model, self._weights, self._replicas, self._place)
            begun = True
        finally:
            if not begun:
                self.close()
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until vLLM can be asked; do nothing where it can. A failure ends its processes; see the class."""
        if self._info:
            return
        ready = False
        try:
            self._info = self._starting.wait(self._load_message(False))
            ready = True
        finally:
            if not ready:
                self.close()
        self._replicas.listen(self._on_message, self._on_lost)

    @property
    def info(self) -> Mapping[str, Any]:
        """What vLLM says of itself. RuntimeError: it is not ready yet."""
        if not self._info:
            raise RuntimeError("vLLM is still starting: call wait_until_ready() first")
        return self._info

    @property
    def config(self) -> VllmConfig:
        """The settings that vLLM was started with."""
        return self._config.vllm

    @property
    def dtype(self) -> str:
        """The dtype that vLLM computes in."""
        return str(self.info["dtype"])

    @property
    def numerics(self) -> Mapping[str, str]:
        """The settings that change its numbers as NAME=VALUE, each with its kind (see `numeric_arguments`)."""
        return numeric_settings(self._config.vllm)

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._weights.version

    @property
    def pid(self) -> int:
        """Number of vLLM's process, or of the first copy's."""
        return self._replicas.pids[0]

    @property
    def pids(self) -> list[int]:
        """Numbers of all copies' processes."""
        return self._replicas.pids

    @property
    def alive(self) -> bool:
        """Whether vLLM, or at least one of its copies, is alive."""
        return self._lost is None

    @property
    def copies(self) -> list[int]:
        """The copies that are alive."""
        return self._replicas.alive

    @property
    def lost_copies(self) -> Mapping[int, str]:
        """Last output of each copy that died while others live."""
        return self._replicas.dead

    def take_accepted(self) -> float | None:
        """Return how many drafted tokens a request's decode step accepted on average since the last call; None where
        nothing drafts, or no step was made."""
        accepted = self._requests.take_accepted()
        return accepted if self._config.vllm.arguments.get("speculative_config") else None

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether this engine has the feature. Raise ValueError with all features for an unknown name."""
        if feature == "sleep" and self.info["device"] == "cpu":
            return Unsupported("vLLM refuses it on a CPU")
        if feature in ("experts_over_copies", "pipeline_parallel") and self.info["device"] != "cpu":
            return Unsupported("it ran on a CPU alone, no accelerator has run it")
        if feature == "structured_outputs" and self._config.tokenizer is None:
            return Unsupported(NO_TOKENIZER)
        return feature_of(VLLM, feature)

    def load(self) -> Load:
        """Return how many requests run and wait at this moment. Never blocks; any thread may call it."""
        sent, waiting = self._requests.counts()
        running = min(sent, self._config.max_batch * len(self.copies))
        return Load(running, waiting + sent - running)

    def close(self) -> None:
        """End vLLM's process and fail open requests; do nothing where it was closed before."""
        if not self._closed:
            self._closed = True
            self._replicas.close()
            self._weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        media: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        on_tokens: OnTokens | None = None,
        copy: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Completion:
        """Sample one completion beside other requests; see `RolloutEngine`. `copy`: by this copy, whatever its load.

        Raises:
            ValueError: as in the protocol; a seed where vLLM reads prompts in parts on a CPU.
            EpisodeFailed: the request's copy is gone and others are not: try again.
            RuntimeError: vLLM's process is gone.
        """
        check_request(prompt_ids, sampling, self.info["vocab_size"], self.info["max_length"])
        check_structured(sampling, self.info["ends"])
        if self.info["device"] == "cpu" and (why := prompt_refusal(self._described, len(prompt_ids))):
            raise ValueError(why)
        seed = self._seed(sampling)
        loop = asyncio.get_running_loop()
        shown = shown_in(self._vision_spec, prompt_ids, media) if media else None
        answer = loop.create_future()
        number, prompt = next(self._numbers), tuple(prompt_ids)
        request = VllmRequest(number, prompt, sampling, seed, on_tokens, loop, answer, shown=shown, copy=copy)
        request.prompt_logprobs = prompt_logprobs
        with self._open.opened(request, request_id, deadline):
            try:
                self._requests.add(request)
                return await request.answer
            except asyncio.CancelledError:
                self._requests.drop(request)
                raise

    async def score(self, ids: Sequence[int], k: int = 0) -> TokenScores:
        """Score tokens as the prompt of one more; see `RolloutEngine`. `EpisodeFailed` where a pause aborts it."""
        check_scored(ids, k, self.info["vocab_size"], self.info["max_length"] - 1)
        done = await self.generate(ids, Sampling(max_new_tokens=1, greedy=True), prompt_logprobs=k)
        if PROMPT_LOGPROBS not in done.extras:
            raise EpisodeFailed("the scores were aborted", retryable=True)
        return scores_of_rows(ids, k, done.extras[PROMPT_LOGPROBS], self.info["vocab_size"])

    async def cancel(self, request_id: str) -> bool:
        """End a request after the running step: its `generate` returns the tokens so far, with stop_reason "abort".
        Return False where no such request is waiting or running."""
        return self._open.cancel(request_id)

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Start no waiting request, and return once nothing runs. "abort" ends running ones after the present step."""
        check_pause(mode)
        await self._requests.hold(mode == "abort")

    async def resume(self) -> None:
        """Run the waiting requests and new ones, and drop the old weights that a commit kept."""
        self._weights.settle()
        if not self._asleep:
            self._requests.release()

    async def sleep(self) -> None:
        """Free the device's memory of weights and caches, once nothing runs; requests wait until `wake`. ValueError
        where vLLM was not started for it, or can't do it on this device; RuntimeError where its process is gone."""
        if not self._config.vllm.sleep:
            raise ValueError("vLLM can't sleep as it was started: set VllmConfig(sleep=True)")
        await self._sleep()

    async def wake(self) -> None:
        """Allocate the memory again, read the staged weights in use, then sample. Do nothing if awake. RuntimeError
        where vLLM's process is gone."""
        if self._asleep:
            paused = await self._read_weights(fall_back=False, wake=True)
            if self._unread:
                self._note_transfer(paused)
            self._asleep = self._unread = False
            self._requests.release()

    async def _sleep(self) -> None:
        await self._requests.hold(abort=False)
        if not self._asleep:
            await self._replicas.call("sleep", {})
            self._asleep = True

    def _seed(self, sampling: Sampling) -> int | None:
        """Return the seed for vLLM, if any: on a CPU one for every request, as runs repeat there, where vLLM can take
        one; on an accelerator, where it costs a kernel a token, the request's own."""
        cpu = self.info["device"] == "cpu"
        if self._config.vllm.drop_seeds or sampling.greedy:
            return None
        if cpu and self._config.vllm.reads_in_parts:
            if sampling.seed is not None:
                raise ValueError(
                    "a seed can't be had where vLLM reads prompts in parts on a CPU, which ends its process: leave it "
                    "out, set VllmConfig.drop_seeds, or VllmConfig.prefix_cache and split_prompts off"
                )
            return None
        return self._seeds.getrandbits(63) if cpu and sampling.seed is None else sampling.seed

    async def prepare(self, manifest: Manifest) -> None:
        """Begin to stage new weights beside those in use; sampling goes on."""
        self._weights.prepare(manifest)
        self._staged_s = 0.0

    async def receive(self, bucket: Bucket) -> int:
        """Stage a bucket and return the number of missing elements."""
        if isinstance(bucket, PartsBucket):
            self._weights.stage_parts(bucket.place)
            return 0
        start = time.perf_counter()
        missing = self._weights.receive(bucket.pieces())
        self._staged_s += time.perf_counter() - start
        return missing

    async def commit(self, version: int) -> None:
        """Let vLLM read the staged weights between two steps, or at `wake`; the old ones are kept until `resume`.

        Raises:
            ValueError: they are not whole, or of another version; the old ones stay.
            RuntimeError: vLLM did not take them; it has the old ones again, or its process is gone.
        """
        start = time.perf_counter()
        self._weights.commit(version)
        self._staged_s += time.perf_counter() - start
        if self._asleep:
            self._unread = True
            return
        taken = False
        try:
            paused = await self._read_weights(fall_back=True)
            taken = True
        finally:
            if not taken:
                self._weights.abort()
                self._replicas.tell("load", self._load_message(False))  # also in copies that took the new ones
        self._note_transfer(paused)

    def _note_transfer(self, paused: float) -> None:
        nbytes = self._weights.nbytes
        share = nbytes / (self._staged_s + paused) / copy_rate(nbytes, self._weights.device)
        self.transfer = Transfer(nbytes, self._staged_s, paused, share)

    async def abort(self) -> None:
        """Drop what is staged, or let vLLM read the old weights again after a commit."""
        before = self._weights.version
        self._weights.abort()
        self._unread = False
        if self._weights.version != before and not self._asleep:
            await self._read_weights(fall_back=False)

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace all weights by those of a stream in this process, or raise ValueError and keep the old ones."""
        stream, whole, start = iter(pieces), False, time.perf_counter()
        try:
            self._weights.prepare(Manifest(version))
            self._weights.receive(stream)
            whole = True
        finally:
            if not whole:
                deque(stream, maxlen=0)  # other ranks of a collective export wait for this one
                self._weights.abort()
        self._staged_s = time.perf_counter() - start
        await self.commit(version)
        self._weights.settle()

    async def _read_weights(self, fall_back: bool, wake: bool = False) -> float:
        """Let vLLM read the weights in use; return the seconds that it took."""
        return await self._replicas.call("load", self._load_message(fall_back) | {"wake": wake}, in_step=fall_back)

    def _load_message(self, fall_back: bool) -> dict[str, Any]:
        path, digests = self._weights.place
        return {
            "path": path,
            "digests": digests,
            "before": self._weights.place_before if fall_back else None,
            "version": self.version,
            "recompute": self._config.on_commit == "recompute",
        }

    def _send(self, copy: int, message: dict[str, Any], tail: Sequence[memoryview] = ()) -> None:
        self._replicas.send(copy, message, tail)

    def _on_message(self, message: dict[str, Any]) -> None:
        """Pass on a copy's message on requests."""
        if "step" in message:
            self._requests.on_step(message["step"], message["version"])
        else:
            self._requests.refused(message["not_asked"], ValueError(message["error"]))

    def _on_lost(self, copy: int, words: str) -> None:
        """Fail the requests of a copy that is gone, or all requests after the last one."""
        if self._replicas.alive and not self._closed:
            problem = f"copy {copy} of {self._config.vllm.data_parallel} is gone: {words}"
            log.error("%s\nthe others go on without it", problem)
            self._requests.fail_copy(copy, EpisodeFailed(problem, retryable=True))
        else:
            self._lost = RuntimeError(words)
            self._requests.fail_all(self._lost)
