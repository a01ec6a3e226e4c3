"""Agents of frameworks as their quickstarts have them, played token by token: the address and key of the policy apart,
nothing is changed.

    python -m rollout.testing.quickstarts

prints a table of those that are installed; no environment of Python has them all, as they want several openai.
"""

import asyncio
import inspect
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollout.chat.chat import Chat
from rollout.engine import Sampling
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_group
from rollout.gateway.agents import AgentSlot, AgentTask
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.forced import ForcedEngine, stock_log_probs
from rollout.testing.model import tiny_model
from seqpack.extensions.load_object import load_object

QUESTION = "37+58="
ADD = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

'''
MCP = f"""
from mcp.server import MCPServer

server = MCPServer("arithmetic")
{ADD}
server.tool()(add)
server.run()
"""
_OPENAI_AGENTS = """
from agents import Agent, {MODEL}, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def ask(question, base_url, api_key, model, command, env):
    params = {"command": command[0], "args": command[1:], "env": env}
    async with (
        AsyncOpenAI(base_url=base_url, api_key=api_key) as client,
        MCPServerStdio(params=params, client_session_timeout_seconds=300) as server,
    ):
        model = {MODEL}(model=model, openai_client=client)
        agent = Agent(name="Assistant", instructions="Use the tools.", mcp_servers=[server], model=model)
        return (await Runner.run(agent, question)).final_output
"""
_PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def ask(question, base_url, api_key, model, **_):
    model = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, instructions="Be concise, reply with one sentence.", tools=[add])
    return (await agent.run(question)).output
"""
_LANGGRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


async def ask(question, base_url, api_key, model, **_):
    model = ChatOpenAI(model=model, base_url=base_url, api_key=api_key).bind_tools([add])

    async def chatbot(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("chatbot", chatbot)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "chatbot")
    graph.add_conditional_edges("chatbot", tools_condition)
    graph.add_edge("tools", "chatbot")
    state = await graph.compile().ainvoke({"messages": [{"role": "user", "content": question}]})
    return state["messages"][-1].content
"""
_LANGCHAIN = """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


async def ask(question, base_url, api_key, model, **_):
    model = ChatOpenAI(model=model, base_url=base_url, api_key=api_key)
    agent = create_agent(model, tools=[add], system_prompt="You are a helpful assistant")
    state = await agent.ainvoke({"messages": [{"role": "user", "content": question}]})
    return state["messages"][-1].content
"""
_SMOLAGENTS = """
from smolagents import CodeAgent, OpenAIServerModel, tool


def ask(question, base_url, api_key, model, **_):
    model = OpenAIServerModel(model_id=model, api_base=base_url, api_key=api_key)
    return CodeAgent(tools=[tool(add)], model=model, verbosity_level=0).run(question)
"""
_LITELLM = """
import json

import litellm

INTEGERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": INTEGERS, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]


async def ask(question, base_url, api_key, model, **_):
    messages = [{"role": "user", "content": question}]
    given = {"model": f"openai/{model}", "api_base": base_url, "api_key": api_key, "tools": TOOLS}
    answer = (await litellm.acompletion(messages=messages, tool_choice="auto", **given)).choices[0].message
    messages.append(answer)
    for call in answer.tool_calls:
        content = str(add(**json.loads(call.function.arguments)))
        messages.append({"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": content})
    return (await litellm.acompletion(messages=messages, **given)).choices[0].message.content
"""
QUICKSTARTS = {
    "openai-agents": _OPENAI_AGENTS.replace("{MODEL}", "OpenAIChatCompletionsModel"),
    "openai-agents, Responses API": _OPENAI_AGENTS.replace("{MODEL}", "OpenAIResponsesModel"),
    "pydantic-ai-slim": _PYDANTIC_AI,
    "langgraph": _LANGGRAPH,
    "langchain": _LANGCHAIN,
    "smolagents": _SMOLAGENTS,
    "litellm": _LITELLM,
}
"""Source of each framework's agent by its distribution; `ask` returns the answer."""
CALL = """<tool_call>
<function=add>
<parameter=a>
37
</parameter>
<parameter=b>
58
</parameter>
</function>
</tool_call>"""
CODE = "Thought: I add.\n<code>\nfinal_answer(add(a=37, b=58))\n</code>"


@dataclass(frozen=True)
class Played:
    """What became of an agent's episodes: the requests, the tokens that were sampled, those that are trained, and the
    largest difference of a trained token's log-prob to stock transformers'."""

    episodes: tuple[Episode, ...]
    requests: int
    sampled: int
    trained: int
    difference: float


def play(name: str, folder: Path, size: int = 2) -> Played:
    """Play a group of a framework's agent; ImportError where it is not installed. `folder` takes its file."""
    (folder / "server.py").write_text(MCP)
    (folder / "agent.py").write_text(ADD + QUICKSTARTS[name])
    ask: Callable[..., Any] = load_object(f"{folder}/agent.py:ask", "agent")
    path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}

    def started(slot: AgentSlot) -> Any:
        where = {"base_url": slot.base_url, "api_key": slot.api_key, "model": slot.model}
        return ask(QUESTION, **where, command=[sys.executable, str(folder / "server.py")], env=path)

    async def awaited(slot: AgentSlot) -> float:
        return float("95" in str(await started(slot)))

    def blocking(slot: AgentSlot) -> float:
        return float("95" in str(started(slot)))

    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab=len(tokenizer), layers=2)

    def said(prompt: Sequence[int], _: int) -> list[int]:
        text = tokenizer.decode(prompt)
        turn = CODE if "final_answer" in text else "It is 95." if "<tool_response>" in text else CALL
        return list(tokenizer(turn + "<|im_end|>", add_special_tokens=False)["input_ids"])

    engine = ForcedEngine(model, said)
    agent: Callable[[AgentSlot], float | Awaitable[float]] = awaited if inspect.iscoroutinefunction(ask) else blocking
    sampling = Sampling(max_new_tokens=300)
    episodes = asyncio.run(run_group(AgentTask(agent), engine, Chat(tokenizer), sampling, size=size, max_turns=4))
    segments = [segment for episode in episodes for segment in episode.segments]
    differences = [0.0]
    for segment in segments:
        stock = stock_log_probs(model, segment.ids).tolist()
        pairs = zip(segment.log_probs, stock, segment.loss_mask, strict=True)
        differences += [abs(own - wanted) for own, wanted, is_trained in pairs if is_trained]
    sampled = sum(len(completion.ids) for completion in engine.completions)
    trained = sum(segment.sampled for segment in segments)
    return Played(tuple(episodes), len(engine.completions), sampled, trained, max(differences))


def main() -> None:
    """Print a row for each framework that is installed."""
    print("| framework | version | reward | requests | tokens sampled | trained | log-probs differ by |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in QUICKSTARTS:
        try:
            installed = version(name.partition(",")[0])
        except PackageNotFoundError:
            continue
        with tempfile.TemporaryDirectory() as folder:
            got = play(name, Path(folder))
        rewards = [0.0 if e.score is None else e.score.reward for e in got.episodes]
        counts = f"{got.requests} | {got.sampled} | {got.trained}"
        print(f"| {name} | {installed} | {sum(rewards) / len(rewards):g} | {counts} | {got.difference:.0e} |")


if __name__ == "__main__":
    main()
