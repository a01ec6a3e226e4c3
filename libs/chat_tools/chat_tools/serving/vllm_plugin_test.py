"""The plug-in inside vLLM, in its own Python: found by its path, and each format read whole and in pieces."""

import json
import os
import subprocess
import sys
from pathlib import Path

from chat_tools.parsing.formats import FORMATS

PLUGIN = Path(__file__).with_name("vllm_plugin.py")
PROGRAM = """
import json, sys
sys.path[:0] = json.loads(sys.argv[2])
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
from chat_tools.parsing.formats import FORMATS
from chat_tools.testing.fuzzing import TOOLS

class Tokenizer:
    def get_vocab(self):
        return {}

ToolParserManager.import_tool_parser(sys.argv[1])
calls = [("f", {"text": "word <b> \\"x\\" " * 40, "count": 3}), ("g", {})]
for name, fmt in FORMATS.items():
    kind = ToolParserManager.get_tool_parser("tessera_" + name)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    text = ("" if fmt.opening.endswith(("{", "[")) else "Look. \\n\\n") + fmt.write(calls) + "\\n"
    parser = kind(Tokenizer(), request.tools)
    assert parser.adjust_request(request).skip_special_tokens is False
    whole = parser.extract_tool_calls(text, request)
    assert whole.tools_called, name
    told = [(call.function.name, json.loads(call.function.arguments)) for call in whole.tool_calls]
    assert told == calls, (name, told)
    bare = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])
    given = kind(Tokenizer(), request.tools).extract_tool_calls(text, bare)  # tools that the request does not repeat
    assert [json.loads(call.function.arguments) for call in given.tool_calls] == [c[1] for c in calls], name
    at_once = kind(Tokenizer(), request.tools).extract_tool_calls_streaming("", text, text, [], [], [], request)
    assert at_once is None or len(at_once.tool_calls) <= len(calls), name  # one entry a call
    parser, seen, content, deltas = kind(Tokenizer(), request.tools), "", "", 0
    streamed = {}
    for start in range(0, len(text), 5):
        piece = text[start : start + 5]
        delta = parser.extract_tool_calls_streaming(seen, seen + piece, piece, [], [], [], request)
        seen += piece
        for call in delta.tool_calls if delta else ():
            entry = streamed.setdefault(call.index, {"id": None, "name": None, "arguments": ""})
            entry["id"] = entry["id"] or call.id
            entry["name"] = entry["name"] or call.function.name
            entry["arguments"] += call.function.arguments or ""
            deltas += 1
        content += (delta.content or "") if delta else ""
    assert [(c["name"], json.loads(c["arguments"])) for c in streamed.values()] == calls, (name, streamed)
    assert all(c["id"] for c in streamed.values()), name
    assert content == (whole.content or ""), (name, content, whole.content)
    assert parser.get_remaining_unstreamed_args() == "", name
    print(name, deltas)
    if fmt.section and fmt.bare:  # the wrapper's beginning is missing: its end is no text
        text = fmt.write(calls[:1]).replace(fmt.section[0] + "\\n", "")
        found = kind(Tokenizer(), request.tools).extract_tool_calls(text, request)
        assert len(found.tool_calls) == 1, name
        assert found.content is None, (name, found.content)
"""


def test_every_format_inside_vllm() -> None:
    path = json.dumps([place for place in sys.path if "chat_tools" in place])
    command = [os.path.abspath(os.environ["TESSERA_VLLM_PYTHON"]), "-c", PROGRAM, str(PLUGIN), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    deltas = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1)
    assert deltas.keys() == FORMATS.keys()
    assert all(int(count) > 50 for count in deltas.values()), f"a long argument comes as it is written: {deltas}"
