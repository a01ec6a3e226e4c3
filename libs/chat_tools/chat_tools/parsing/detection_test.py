import pytest

from chat_tools.parsing.detection import detect_format
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

FAMILY = {
    "chatml": "hermes",
    "thinking": "qwen3_xml",
    "llama": "llama3_json",
    "mistral": "mistral",
    "gemma": "gemma",
    "glm": "glm-4.5",
    "deepseek": "deepseek_v3.1",
    "harmony": "harmony",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("marks", [True, False])
def test_each_family_is_known_by_the_call_it_writes(name, marks):
    assert detect_format(tiny_tokenizer(name, marks)) == FAMILY[name]


def test_a_template_that_refuses_calls_is_known_by_its_text():
    template = "{{ raise_exception('no') }}{# tools are called with <function= in <tool_call> #}"
    assert detect_format(tiny_tokenizer("chatml", template=template)) == "qwen3_xml"


def test_no_format():
    with pytest.raises(ValueError, match="choose one of"):
        detect_format(tiny_tokenizer("chatml", template="{{ messages[0].content }}"))
