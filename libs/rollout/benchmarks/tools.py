"""What a call of a tool, of the sandbox and of a reward costs: PYTHONPATH=libs/rollout:libs/chat_tools:libs/seqpack python libs/rollout/benchmarks/tools.py

Best of several rounds, one at a time unless said otherwise.
"""  # noqa: E501

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from rollout.rewards.math_answer import MathChecker
from rollout.tools.arithmetic import calculator
from rollout.tools.sandbox.sandbox import Program, Sandbox, SandboxRefusedError
from rollout.tools.tool import Tool, ToolCall, call_tools

SCHEMA = {"type": "object", "properties": {}}
ROUNDS = 5


def best(work: Callable[[], object], count: int) -> str:
    """Return the calls a second of the best round of `work`, which makes `count` calls."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return f"{count / min(seconds):9,.0f} calls/s ({min(seconds) / count * 1e3:.2f} ms each)"


async def await_nothing() -> str:
    await asyncio.sleep(0)
    return "x"


def play(tool: Tool, call: ToolCall) -> None:
    asyncio.run(call_tools([tool], [call] * 200))


def tools() -> None:
    cases = {
        "a tool that blocks, in its thread": (Tool("f", "", SCHEMA, lambda: "x"), ToolCall("f", "{}")),
        "an async tool, on its own loop": (Tool("f", "", SCHEMA, await_nothing), ToolCall("f", "{}")),
        "the calculator, instant": (calculator(), ToolCall("calculator", '{"expression": "37+58"}')),
    }
    for name, (tool, call) in cases.items():
        print(f"{name:45}", best(partial(play, tool, call), 200))


def sandbox(backend: str, count: int) -> None:
    made = Sandbox(backend=backend)
    began = time.perf_counter()
    try:
        made.start()
    except SandboxRefusedError as refused:
        print(f"sandbox by {backend}: {refused}")
        return
    print(f"{f'sandbox by {backend}: its start':45} {(time.perf_counter() - began) * 1e3:9.0f} ms")
    print(f"{'  warm, one at a time':45}", best(lambda: [made.run("1 + 1") for _ in range(count)], count))
    print(f"{'  warm, 16 at a time':45}", best(lambda: made.run_all([Program("1 + 1")] * count), count))
    made.close()


def main() -> None:
    tools()
    bare = [sys.executable, "-I", "-S", "-c", "1 + 1"]
    print(
        f"{'a bare interpreter, no sandbox':45}",
        best(lambda: [subprocess.run(bare, check=True) for _ in range(10)], 10),
    )
    sandbox("namespaces", 100)
    sandbox("bubblewrap", 5)
    checker = MathChecker()
    checker.equal("1", "2")
    print(
        f"{'math-verify, other than the same text':45}",
        best(lambda: [checker.equal("0.5", r"\frac{1}{3}") for _ in range(50)], 50),
    )
    checker.close()


if __name__ == "__main__":
    main()
