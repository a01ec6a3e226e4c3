"""The plug-in inside vLLM, in its own Python: found by its path, each format read whole and in pieces, and what vLLM's
server makes of it: a stream says what the whole answer says.
"""

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

SERVED = """
import json, re, sys
sys.path[:0] = json.loads(sys.argv[2])
import vllm.parser.abstract_parser as served
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
from chat_tools.testing.fuzzing import TOOLS

ToolParserManager.import_tool_parser(sys.argv[1])
THINK = {"<think>": 2_000_000, "</think>": 2_000_001}
NAMES = {number: word for word, number in THINK.items()}

class Tokenizer:
    def get_vocab(self):
        return THINK
    vocab = property(get_vocab)
    def encode(self, text, **_):
        return [THINK.get(word) or ord(word) for word in re.findall("</?think>|.", text, re.DOTALL)]
    def decode(self, ids, **_):
        return "".join(NAMES.get(i) or chr(i) for i in ids)

def json_or_none(text):
    try:
        return json.loads(text)
    except ValueError:
        return None

def run(name, text, choice, thinker, tools, prompt):
    class Parser(served.DelegatingParser):
        reasoning_parser_cls = ReasoningParserManager.get_reasoning_parser(thinker) if thinker else None
        tool_parser_cls = ToolParserManager.get_tool_parser("tessera_" + name)
    options = {"tools": tools, "tool_choice": choice} if tools else {}
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], **options)
    reasoning, content, calls = Parser(Tokenizer(), request.tools).parse(text, request, enable_auto_tools=True)
    whole = reasoning or "", content or "", [(c.name, json.loads(c.arguments)) for c in calls or ()]
    parser, said, told = Parser(Tokenizer(), request.tools), {"reasoning": "", "content": ""}, {}
    ids = Tokenizer().encode(text)
    for place, token in enumerate(ids):
        delta = parser.parse_delta(
            Tokenizer().decode([token]), [token], request, prompt_token_ids=prompt, finished=place == len(ids) - 1
        )
        for part in said:
            said[part] += (getattr(delta, part) or "") if delta else ""
        for call in delta.tool_calls if delta else ():
            entry = told.setdefault(call.index, ["", ""])
            entry[0] += call.function.name or ""
            entry[1] += call.function.arguments or ""
    arguments = [(name, json_or_none(text)) for name, text in told.values()]  # what breaks off is no call
    return whole, (said["reasoning"], said["content"], [call for call in arguments if call[1] is not None])

good = '<tool_call>{"name": "f", "arguments": {"text": "x"}}</tool_call>'
tagged = "<tool_call>\\n<function=f>\\n<parameter=text>\\nx\\n</parameter>\\n</function>\\n</tool_call>"
rows = [
    ["hermes", "Compare a <"],
    ["hermes", "Use <tool_call> tags for calls."],
    ["gemma", "call: me tomorrow"],
    ["llama3_json", "{not json: it is a set"],
    ["pythonic", "[x for x in y"],
    ["hermes", "Use <tool_call> tags for calls, as " + good + " does"],
    ["hermes", "Look. </tool_call> It is\\n" + good],
    ["hermes", "Look. </tool_call> It is"],
    ["hermes", good + "</tool_call>"],
    ["hermes", '<tool_call>{"name": "f", "arguments": {"text": "cut by max'],
    ["hermes", '<tool_call>{"name": "f", "arguments": {"text": "x", "text": "y"}}</tool_call>'],
    ["qwen3_xml", tagged + "\\nDone.\\n"],
    ["hermes", " two lines\\n\\n"],
    ["hermes", "<think>so</think>Hi"],
    ["hermes", "so</think>Hi"],
    ["hermes", "The tag <think> opens thoughts."],
    ["qwen3_xml", "<think>\\nplan\\n</think>\\n\\nHi"],
    ["hermes", "<think>so</think>" + good],
    ["hermes", "<think>so " + good + "</think>Hi"],  # a call that is thought of is none
    ["xlam", '<think>so</think>[{"name": "f", "arguments": {"text": "x"}}]'],
]
for name, text in rows:
    for choice, tools in (("auto", TOOLS), ("none", TOOLS), ("none", None)):
        whole, streamed = run(name, text, choice, None, tools, [1])
        if whole != streamed or (choice == "none" and whole != ("", text, [])):
            print("DIFFERS", json.dumps([name, text, choice, bool(tools), whole, streamed]))
for thinker in ("deepseek_r1", "qwen3"):
    for name, text in rows[:13]:
        for choice in ("auto", "none"):
            whole, streamed = run(name, "so it is</think>" + text, choice, thinker, TOOLS, [THINK["<think>"]])
            if whole != streamed or whole[0] != "so it is":
                print("DIFFERS", json.dumps([thinker, name, text, choice, whole, streamed]))
required = '[{"name": "f", "parameters": {"text": "x"}}, {"name": "g", "parameters": {}}]'
named = {"type": "function", "function": {"name": "f"}}
for text, choice, calls in (
    (required, "required", [("f", {"text": "x"}), ("g", {})]),
    ('{"text": "x"}', named, [("f", {"text": "x"})]),
):
    whole, streamed = run("hermes", text, choice, None, TOOLS, [1])
    if not whole[2] == streamed[2] == calls:
        print("DIFFERS", json.dumps([choice, whole, streamed]))
"""


def inside_vllm(program: str) -> str:
    path = json.dumps([place for place in sys.path if "chat_tools" in place])
    command = [os.path.abspath(os.environ["TESSERA_VLLM_PYTHON"]), "-c", program, str(PLUGIN), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_served_stream_says_what_the_whole_answer_says() -> None:
    """With no reasoning parser, with two of vLLM's, and whatever `tool_choice` is."""
    told = inside_vllm(SERVED)
    assert [json.loads(line[8:]) for line in told.splitlines() if line.startswith("DIFFERS ")] == []


def test_every_format_inside_vllm() -> None:
    done = inside_vllm(PROGRAM)
    deltas = dict(line.split() for line in done.splitlines() if line.count(" ") == 1)
    assert deltas.keys() == FORMATS.keys()
    assert all(int(count) > 50 for count in deltas.values()), f"a long argument comes as it is written: {deltas}"
