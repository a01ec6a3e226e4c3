from pathlib import Path

from chat_tools.testing.reference_cases import llama_cases, server_cases

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SOURCE = r"""
static common_chat_tool add_tool{
    /* .name = */ "add",
    /* .description = */ "adds",
    /* .parameters = */ R"({"type": "object", "properties": {"a": {"type": "integer"}}})",
};
const common_chat_msg one_call = simple_assist_msg("", "", "add", "{\"a\": 1}");
        auto tst = peg_tester("models/templates/tiny.jinja", detailed_debug);
        tst.test(
               "<tool_call>\n"
               R"x({"name": "add", "arguments": {"a": 1}})x"
               "\n</tool_call>")
            .tools({ add_tool })
            .expect(one_call)
            .run();
        tst.test("<tool_call>{\"name\": \"f\"")
            .is_partial(true)
            .expect_tool_calls({ { "f", "", {} } })
            .run();
        tst.test("two")
            .expect_tool_calls({
                { "add", R"({"a": 1})", {} },
                { "add", R"({"a": 2})", {} },
            })
            .run();
        tst.test("a text of " + another)
            .expect(one_call)
            .run();
"""


def test_the_whole_turns_of_llama_cpp_with_the_calls_that_they_expect(tmp_path: Path) -> None:
    (tmp_path / "test-chat.cpp").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "tiny.jinja").write_text(TEMPLATE, encoding="utf-8")
    call, two = llama_cases(tmp_path)
    assert (call.name, call.expected) == ("hermes", [("add", {"a": 1})])
    assert call.text == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert call.tools[0]["function"]["parameters"]["properties"] == {"a": {"type": "integer"}}
    assert (two.text, two.expected) == ("two", [("add", {"a": 1}), ("add", {"a": 2})])


def test_the_texts_of_a_servers_tests_beside_examples_and_malformed_turns(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_hermes_tool_parser.py").write_text(
        'A = \'<tool_call>{"name": "from_a_test", "arguments": {}}</tool_call>\'\nB = "no marker of a call here"\n'
    )
    (tmp_path / "malformed.jsonl").write_text('{"format": "hermes", "text": "<tool_call>", "calls": []}\n')
    cases = [c for c in server_cases("vllm", tmp_path, tmp_path / "malformed.jsonl", []) if c.name == "hermes"]
    assert len(cases) == 4
    assert [c.expected for c in cases] == [None, None, [], None]
    assert "from_a_test" in cases[-1].text
    assert [tool["function"]["name"] for tool in cases[-1].tools] == ["weather", "from_a_test"]
