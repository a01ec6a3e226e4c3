"""Environments of `verifiers` 0.4 (its v1 API: Taskset, Task, Harness, Agent, Env), played through a gateway.

Needs the extra `verifiers`. Its default harnesses fetch uv and packages, and its default runtime is remote: here the
program of an agent is `InProcessHarness`, a chat loop in this process, or one of verifiers' own in its subprocess
runtime, run by this Python: its chat program (`ProgramHarness`), or another (`program_harness`). None needs a network;
the tools of a task are its MCP servers, which verifiers starts on this machine.

Strategy
1. verifiers sends each model call through a proxy of its own to the gateway, with the trace's id as X-Session-ID.
2. The moment a trace is made, `AgentSlot.join` opens that session: the gateway records its exact tokens.
3. The trace's rewards, which verifiers computed, are the parts of the episode's score.
"""

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rollout.extras import missing_extra_message

try:
    import verifiers.v1 as vf
    from openai import AsyncOpenAI
    from verifiers.v1.configs.agent import resolve_agent
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.episode import EnvInfo
    from verifiers.v1.episode import Episode as VerifiersEpisode
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.mcp.launch import serve_shared
    from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
    from verifiers.v1.trace import TraceTask
except ImportError as error:
    raise ImportError(missing_extra_message("environments of verifiers need it", "verifiers")) from error

from rollout.chat.chat import Chat
from rollout.engine import RolloutEngine, Sampling
from rollout.environments.environment import Score
from rollout.environments.sources import TaskRow
from rollout.episodes.episode import Episode
from rollout.errors import EpisodeFailed
from rollout.gateway.agents import AgentSlot, AgentTask

_MAY_PASS = frozenset({"HarnessError", "ToolsetError", "SandboxError", "InterceptionError", "TunnelError"})
"""verifiers' names for failures of programs, tool servers and connections, not of a task's own code."""
MAX_CALLS = 64  # most rounds of tool calls in one turn


class InProcessHarness(vf.Harness[HarnessConfig]):
    """A chat loop in this process: it calls the task's tools until the model's turn has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: HarnessConfig | None = None) -> None:
        super().__init__(config or HarnessConfig(id="null"))

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Play one segment. Model calls go to `endpoint` with `secret`, tools to `mcp_urls`."""
        del trace, runtime
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            tools, dispatch, live = await connect_mcp({"mcpServers": servers}, stack)
            offered = {"tools": tools} if tools else {}
            for _ in range(MAX_CALLS):
                answer = await api.chat.completions.create(model=ctx.model, messages=messages, **offered)
                message = answer.choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    content = await _call_tool(live, dispatch, call)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                if not message.tool_calls:
                    break
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _call_tool(live: Any, dispatch: Any, call: Any) -> Any:
    """Call a tool and return its result; a call that cannot be made returns an error text for the model."""
    name = call.function.name
    if name not in dispatch:
        return f"Error: there is no tool {name!r}; available: {', '.join(dispatch) or 'none'}"
    return await call_mcp(live, dispatch, name, json.loads(call.function.arguments))


class _ProgramOfThisPython:
    """What changes in a harness of verifiers whose program is a script: who runs it."""

    async def setup(self, runtime: Any) -> None:
        """Return at once: nothing has to be fetched."""

    async def launch(self, ctx: Any, trace: Any, runtime: Any, *arguments: Any, **options: Any) -> ProgramResult:
        """Run the program to its end."""
        launched: ProgramResult = await super().launch(  # type: ignore[misc]
            ctx, trace, _ThisPython(runtime), *arguments, **options
        )
        return launched


def program_harness(
    kind: type[vf.Harness[Any]], config: HarnessConfig, on_host: bool = False
) -> Callable[[], vf.Harness[Any]]:
    """Return the maker (`harness=`) of a harness of verifiers whose program, a script, is run by this Python.

    verifiers' subprocess runtime confines nothing: what `BashHarness` and others execute for the model runs on this
    machine, as this user. A kind for which verifiers therefore asks for a container runs only with `on_host`. The
    packages that the script names have to be installed here.
    """
    made = type(kind.__name__, (_ProgramOfThisPython, kind), {"NEEDS_CONTAINER": kind.NEEDS_CONTAINER and not on_host})
    return lambda: made(config)


class ProgramHarness(_ProgramOfThisPython, NullHarness):
    """verifiers' own chat program, in the subprocess runtime, run by this Python with the packages it has."""

    def __init__(self, config: HarnessConfig | None = None) -> None:
        super().__init__(config or HarnessConfig(id="null"))


class _ThisPython:
    """A runtime in which scripts are run by this process's Python; otherwise the wrapped runtime."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def prepare_uv_script(self, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
        del env, activate
        path = "verifiers_program.py"
        await self._runtime.write(path, script.encode())
        return [sys.executable, path]

    async def run_program(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        packages = os.pathsep.join(path for path in sys.path if path)
        return await self._runtime.run_program(argv, {"PYTHONPATH": packages, **env})


@dataclass(frozen=True)
class VerifiersAgent:
    """The tasks of a verifiers taskset, each played by the policy; called with a slot, it plays and scores one.

    `harness()` makes the agent's program. With `environment` (an `Env` with this taskset) its `run(task, agents)`
    directs the episode: every role is the policy's, and the score is the mean over the traces of trainable roles.
    Rewards become the score's components, metrics too. Raises ValueError for a taskset without end.
    """

    taskset: Any
    harness: Callable[[], Any] = InProcessHarness
    environment: Any = None
    tasks: dict[str, Any] = field(init=False, repr=False)
    open_tools: list[dict[str, Any]] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        if not self.taskset.bounded:
            raise ValueError("the taskset has no end: give a view of it, taskset.take(1000)")
        object.__setattr__(self, "tasks", {task.key: task for task in self.taskset})

    def rows(self) -> list[TaskRow]:
        """Return the tasks, keyed as verifiers does."""
        return [TaskRow(key) for key in self.tasks]

    async def run_group(
        self, engine: RolloutEngine, chat: Chat, sampling: Sampling, *, size: int, **options: Any
    ) -> list[Episode]:
        """Play the episodes of a group, as `AgentTask` does, so that this stands in place of an environment factory."""
        return await AgentTask(self).run_group(engine, chat, sampling, size=size, **options)

    async def __call__(self, slot: AgentSlot) -> Score:
        """Play the task of the slot's episode."""
        task = self.tasks.get(slot.context.task_id)
        if task is None:
            raise ValueError(f"the taskset has no task {slot.context.task_id!r}: take the rows of rows()")
        played: list[Any] = []
        async with AsyncExitStack() as stack:
            client = vf.EvalClientConfig(
                base_url=slot.base_url, api_key_var=stack.enter_context(_key_in_environment(slot))
            )
            shared = self.open_tools[-1] if self.open_tools else await stack.enter_async_context(self._shared_tools())
            if self.environment is None:
                config = vf.AgentConfig(harness=HarnessConfig(id="null"), runtime=SubprocessConfig())
                await _PolicyAgent(config, client, self.harness(), slot, "", played, shared).run(task)
            else:
                await self._direct(task, client, slot, played, shared)
        return _score(played)

    async def _direct(self, task: Any, client: Any, slot: AgentSlot, played: list[Any], shared: dict[str, Any]) -> None:
        env = self.environment

        def make(name: str, spec: Any) -> _PolicyAgent:
            config = spec.model_copy(update={"harness": HarnessConfig(id="null"), "runtime": SubprocessConfig()})
            return _PolicyAgent(config, client, self.harness(), slot, name, played, shared)

        agents = vf.Agents(env.config, make)
        await env.setup(agents)
        await env.run(task, agents)
        trace_task = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        await env.finalize(task, VerifiersEpisode(env=EnvInfo(id=env.config.env_id), task=trace_task, traces=played))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Share the taskset's tool servers, and what an `Env` starts, among episodes; else each makes its own."""
        async with self._shared_tools() as shared:
            self.open_tools.append(shared)
            try:
                yield
            finally:
                self.open_tools.remove(shared)

    @asynccontextmanager
    async def _shared_tools(self) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            toolsets = self.taskset.toolsets(self.taskset.config)
            shared = await stack.enter_async_context(serve_shared(toolsets)) if toolsets else {}
            if self.environment is not None:
                stack.push_async_callback(self.environment.stop)
                await self.environment.start()
            yield shared


class _PolicyAgent(vf.Agent):
    """A role that the policy plays: its traces are sessions of the episode."""

    def __init__(
        self,
        config: Any,
        client: Any,
        harness: Any,
        slot: AgentSlot,
        name: str,
        played: list[Any],
        shared: dict[str, Any],
    ) -> None:
        super().__init__(resolve_agent(config, model=slot.model, client=client))
        self.harness = harness
        self._slot, self._name, self._played, self._shared = slot, name, played, shared

    def _on_trace(self, trace: Any) -> None:
        trace.agent.name = self._name
        trace.agent.trainable = self.trainable
        self._slot.join(trace.id, self._name)

    async def run(self, task: Any, *, tools: Any = None, **options: Any) -> Any:
        trace = await super().run(
            task, tools=self._shared if tools is None else tools, on_trace=self._on_trace, **options
        )
        self._played.append(trace)
        return trace

    @asynccontextmanager
    async def interaction(self, task: Any, *, tools: Any = None, **options: Any) -> AsyncIterator[Any]:
        shared = self._shared if tools is None else tools
        made = None
        try:
            async with super().interaction(task, tools=shared, on_trace=self._on_trace, **options) as made:
                yield made
        finally:
            if made is not None:
                self._played.append(made.trace)


def _score(played: Sequence[Any]) -> Score:
    """Return the mean of the trainable traces' rewards. Raise EpisodeFailed where none was played.

    Raises RuntimeError or, where trying again may help, OSError, if one of them failed. It is no EpisodeFailed, so that
    a limit whose refusal broke the rollout ends the episode as a limit does (`rollout.gateway.agents`).
    """
    traces = [trace for trace in played if trace.agent.trainable]
    if not traces:
        raise EpisodeFailed("verifiers played no trainable agent", retryable=False)
    broken = next((trace for trace in traces if not trace.ok), None)
    if broken is not None:
        last = broken.errors[-1] if broken.errors else None
        reason = "for no stated reason" if last is None else f"{last.type}: {last.message}"
        kind = OSError if last is not None and last.type in _MAY_PASS else RuntimeError
        raise kind(f"verifiers: the rollout failed, {reason}"[:2000])
    parts: dict[str, float] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                parts[name] = parts.get(name, 0.0) + float(reward.value) / len(traces)
    return Score(sum(trace.reward for trace in traces) / len(traces), parts)


_KEYS = Counter[str]()  # how many running episodes read each variable
_KEYS_LOCK = threading.Lock()


@contextmanager
def _key_in_environment(slot: AgentSlot) -> Iterator[str]:
    """Set a variable to the gateway's token while an episode needs it, where verifiers reads keys; yield its name.

    The programs that it starts inherit no variable with API_KEY in its name.
    """
    name = f"ROLLOUT_GATEWAY_{urlsplit(slot.base_url).port}_API_KEY"
    with _KEYS_LOCK:
        _KEYS[name] += 1
        os.environ[name] = slot.gateway.token
    try:
        yield name
    finally:
        with _KEYS_LOCK:
            _KEYS[name] -= 1
            if not _KEYS[name]:
                del os.environ[name]
