"""What stands around a turn in each family, which tokens end one, and what is remembered."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.rendering import turn_delimiters
from chat_tools.rendering.stop_tokens import read_stop_tokens, turn_ends
from chat_tools.rendering.template import ChatTemplate, Message, tokens_as_text
from chat_tools.rendering.turn_delimiters import TurnDelimiters, find_turn_delimiters
from chat_tools.testing.tokenizer import tiny_tokenizer

SAY = {"role": "assistant", "content": "x"}


def framed(
    name: str = "chatml",
    like: Message = SAY,
    stops: tuple[str, ...] | None = None,
    tools: Sequence[Any] | None = None,
    tokens: Sequence[str] = (),
    **kind: Any,
) -> TurnDelimiters:
    """The delimiters of a tokenizer that nobody has used before: they are remembered."""
    tokenizer = tiny_tokenizer(name, **{"marks": False, **kind})
    tokenizer.add_tokens(list(tokens))
    return find_turn_delimiters(ChatTemplate(tokenizer, tools, {}, stops), like)


@pytest.mark.parametrize(
    ("name", "prompt", "before", "closings", "after"),
    [
        ("chatml", "<|im_start|>assistant\n", "<|im_end|>\n", ["<|im_end|>"], "\n"),
        ("thinking", "<|im_start|>assistant\n<think>\n", "<|im_end|>\n", ["<|im_end|>"], "\n"),
        ("llama", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", ["<|eot_id|>"], ""),
        ("mistral", "", "[/INST]", ["</s>"], ""),
        ("gemma", "<start_of_turn>model\n", "<end_of_turn>\n", ["<end_of_turn>"], "\n"),
        ("glm", "<|assistant|>\n", "", [], ""),
        ("deepseek", "<｜Assistant｜>", "", ["<｜end▁of▁sentence｜>"], ""),
        ("harmony", "<|start|>assistant", "<|end|>", ["<|return|>", "<|end|>"], ""),
    ],
)
def test_the_frame_of_a_family(name: str, prompt: str, before: str, closings: list[str], after: str) -> None:
    delimiters = framed(name)
    assert delimiters.prompt == prompt
    assert delimiters.opening == before + prompt
    assert list(delimiters.closings) == closings
    assert delimiters.closing == "".join(closings[:1]) + after
    assert set(closings) <= set(delimiters.stops)
    markers = [match.span() for match in re.finditer(r"<[^<>]*>", prompt)]
    whole = [n for n in range(len(prompt), 0, -1) if not any(a < n < b for a, b in markers)]
    assert list(delimiters.prompt_cuts) == whole


TURN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + BODY + END }}{% endfor %}PROMPT"
PROMPT = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"


def turns(body: str = "m.content", end: str = "'<|im_end|>\n'", prompt: str = PROMPT) -> str:
    return TURN.replace("BODY", body).replace("END", end).replace("PROMPT", prompt)


def test_the_kind_of_content_is_the_messages() -> None:
    """Or, where a turn of calls has none, what the template takes."""
    plain = framed(template=turns())
    parts = turns("m.content[0].text")
    listed = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
    assert framed(template=parts, like=listed) == plain
    both = turns("(m.content if m.content is string else raise_exception('no parts'))")
    assert framed(template=both, like=listed) == plain
    picky = turns("(raise_exception('no text') if m.content is string else m.content[0].text)")
    assert framed(template=picky, like={"role": "assistant", "content": "", "tool_calls": []}) == plain
    assert framed(template=picky, like=listed) == plain


def test_a_template_that_refuses_all_has_the_tokenizers_stop_alone() -> None:
    delimiters = framed(template="{{ raise_exception('no') }}")
    assert delimiters == TurnDelimiters("", "", stops=("<|im_end|>",))
    assert delimiters.prompt_cuts == ()


@pytest.mark.parametrize(
    ("end", "closings"),
    [
        ("'<|im_end|>'", ["<|im_end|>"]),
        ("'[A][B]<|im_end|>'", ["<|im_end|>"]),  # the known one
        ("'[A][B]'", ["[B]"]),  # else the last
        ("'.[A]'", ["[A]"]),
        ("('[A]' if loop.last else '[B]')", ["[A]", "[B]"]),
        ("('[A]' if loop.last else '[B][C]')", ["[A]", "[B]"]),  # of earlier turns the first: the next begins behind
        ("('[A]' if loop.last else '[A][C]')", ["[A]"]),
        ("('[A][C]' if loop.last else '[A][C][B]')", ["[C]"]),
        ("('[A]' if loop.last else '.')", ["[A]"]),
        ("('.' if loop.last else '[A]')", []),
        ("('[A]' if messages | length < 3 else raise_exception('short ones alone'))", ["[A]"]),
    ],
)
def test_which_tokens_end_a_turn(end: str, closings: list[str]) -> None:
    delimiters = framed(template=turns(end=end), tokens=["[A]", "[B]", "[C]"])
    assert list(delimiters.closings) == closings
    assert set(delimiters.stops) == {*closings, "<|im_end|>"}
    assert sorted(map(len, delimiters.stops), reverse=True) == list(map(len, delimiters.stops))


def test_a_prompt_may_be_cut_behind_any_character_of_a_word() -> None:
    delimiters = framed(template=turns(prompt="{{ 'A:' if add_generation_prompt }}"))
    assert (delimiters.prompt, delimiters.prompt_cuts) == ("A:", (2, 1))


class Bare:
    """A tokenizer with a template alone."""

    chat_template = "bare"

    def apply_chat_template(self, conversation: list[Message], add_generation_prompt: bool, **_: Any) -> str:
        said = "".join(f"{m['role']}={m['content']}." for m in conversation)
        return said + ("assistant=" if add_generation_prompt else "")


def test_a_tokenizer_need_not_name_its_ends() -> None:
    assert find_turn_delimiters(ChatTemplate(Bare(), None, {}), SAY) == TurnDelimiters(
        "assistant=", ".", ".assistant=", prompt_cuts=tuple(range(10, 0, -1))
    )


def test_what_begins_the_next_question_ends_no_turn() -> None:
    """As in GLM-4.5, with a blank or without; the token's place before other questions tells."""
    for blank in ("", "\n"):
        template = (
            "{% for m in messages %}{{ '[A]BLANK' + m.content if m.role == 'user' else m.content }}{% endfor %}[A]"
        )
        assert framed(template=template.replace("BLANK", blank), tokens=["[A]"]).closings == ()
    behind = turns("'[A]' + m.content + '.'", end="'[A]'")
    assert framed(template=behind, tokens=["[A]"]).ends == (".[A]",)
    within = "{% for m in messages %}{{ '[A]:' + m.content + '[A]' }}{% endfor %}"
    assert framed(template=within, tokens=["[A]"]).closings == ("[A]",)


def test_the_turn_with_the_mark_is_the_answer() -> None:
    """A template that writes a text twice, or the question again."""
    twice = turns("(m.content + '[A]' + m.content)", end="'[B]'")
    delimiters = framed(template=twice, tokens=["[A]", "[B]"])
    assert delimiters.closings == ("[B]",)  # behind the last words
    assert delimiters.closing.startswith("[B]")
    assert delimiters.opening.startswith("[A]")


def test_a_prompt_begins_with_a_token_of_any_form() -> None:
    shared = turns(prompt="{{ '[go on]' if add_generation_prompt else '[go off]' }}")
    assert framed(template=shared, tokens=["[go on]", "[go off]"]).prompt == "[go on]"


def test_frames_of_other_ends_tools_and_options_are_others() -> None:
    """One tokenizer, whose template writes all that delimiters depend on."""
    template = turns(prompt="{{ [bos_token, eos_token, how, tools | length] if add_generation_prompt }}")
    tokenizer = tiny_tokenizer("chatml", template=template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}

    def prompt(how: str = "x", tools: Sequence[Any] = ()) -> str:
        return find_turn_delimiters(ChatTemplate(tokenizer, tools or [{}], {"how": how}), SAY).prompt

    ways = [prompt(), prompt("y"), prompt(tools=[tool, tool])]
    tokenizer.bos_token = "<|im_start|>"
    ways.append(prompt())
    tokenizer.eos_token = "<|endoftext|>"
    ways.append(prompt())
    assert len(set(ways)) == 5
    listed = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
    for content, same in [
        ("m.content if m.content is string else m.content[0].text ~ ')'", False),
        ("m.content", True),
    ]:
        kinds = tiny_tokenizer("chatml", template=turns(content))  # the second prints the list
        as_list, as_text = (find_turn_delimiters(ChatTemplate(kinds, None, {}), like) for like in (listed, SAY))
        assert (as_list == as_text) == same


def test_few_frames_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_delimiters, "_MOST_FRAMES", 3)
    tokenizer = tiny_tokenizer("chatml", template=turns(prompt="{{ how if add_generation_prompt }}"))
    for number in range(8):
        assert find_turn_delimiters(ChatTemplate(tokenizer, None, {"how": f"{number}"}), SAY).prompt == f"{number}"
        assert 1 <= len(turn_delimiters._FRAMES[tokenizer]) <= 3


TOKENS = ("<|a|>", "[x]", "[x]y", "b")
texts = st.lists(st.sampled_from([*TOKENS, "<t>", "[", "]", "<", ">", "|", " ", "c", "y"]), max_size=8).map("".join)


@settings(deadline=None)
@given(texts, st.data())
def test_no_token_or_tag_is_cut_in_two(text: str, data: st.DataObject) -> None:
    """The oracle walks over the text: at each place the longest token, else a tag, else a character."""
    at = data.draw(st.integers(0, len(text)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_delimiters, "_PATTERNS", {})
        got = turn_delimiters.token_start(text, at, TOKENS)
    begin = 0
    while begin < at:
        here = max((token for token in TOKENS if text.startswith(token, begin)), key=len, default="")
        tag = re.compile(r"<[^<>\s]{1,60}>").match(text, begin)
        end = begin + max(len(here) or (len(tag[0]) if tag else 1), 1)
        if end > at:
            break
        begin = end
    assert got == begin


def test_a_token_is_found_far_behind_in_the_text() -> None:
    text = "x" * 200 + "<|a|>" + "y" * 200 + "<|a|>"
    assert turn_delimiters.token_start(text, 203, TOKENS) == 200
    assert turn_delimiters.token_start(text, 205, TOKENS) == 205
    assert turn_delimiters.token_start(text, 300, TOKENS) == 300
    assert turn_delimiters.token_start(text, 407, TOKENS) == 405
    assert turn_delimiters.token_start(text, 410, TOKENS) == 410


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<a>", "<b>", "<a><b>", "<"]), max_size=5))
def test_leading_tokens_are_the_longest_ones(parts: list[str]) -> None:
    found = turn_delimiters._leading_tokens("".join(parts) + " <a>", ["<a>", "<a><b>", "<b>"])
    until = "".join(parts).partition("<<")[0].removesuffix("<")
    assert "".join(found) == until
    assert all(a + b != "<a><b>" for a, b in pairwise(found))


def test_the_first_stop_within_bounds() -> None:
    delimiters = TurnDelimiters("", "", stops=("<a.>", "<a.><b>"))
    assert TurnDelimiters("", "").first_stop("<a.>", 0, 4) is None
    assert TurnDelimiters("", "", stops=("<a.><b>", "<a.>")).first_stop("x<a.><b>", 0, 8) == (1, 8)
    assert delimiters.first_stop("<ax><a.>", 0, 8) == (4, 8)  # a dot is a dot
    assert delimiters.first_stop("<a.> <a.>", 1, 9) == (5, 9)
    assert delimiters.first_stop("<a.> <a.>", 1, 8) is None


def test_added_tokens_are_what_a_tokenizer_says() -> None:
    bare = SimpleNamespace()
    assert turn_delimiters.added_tokens(bare) == frozenset()
    assert turn_delimiters.added_tokens(SimpleNamespace(all_special_tokens=["<s>", ""])) == {"<s>"}
    both = SimpleNamespace(get_added_vocab=lambda: {"<x>": 7}, all_special_tokens=["<s>"])
    assert turn_delimiters.added_tokens(both) == {"<x>", "<s>"}


def test_the_stops_that_are_known_of_a_tokenizer() -> None:
    """Its own and those of the format that the template writes; not those of every format."""
    silent = tiny_tokenizer("chatml", template="{{ raise_exception('no') }}")
    silent.add_tokens(["<|call|>", "<|tool_response|>"])
    assert turn_delimiters.stop_tokens(ChatTemplate(silent, None, {})) == ("<|im_end|>",)
    silent.eos_token = None
    assert turn_delimiters.stop_tokens(ChatTemplate(silent, None, {})) == ()
    assert turn_delimiters.stop_tokens(ChatTemplate(silent, None, {}, ("<|other|>",))) == ("<|other|>",)
    assert turn_delimiters.stop_tokens(ChatTemplate(silent, None, {}, ())) == ()
    harmony = tiny_tokenizer("harmony", marks=False)
    assert set(turn_delimiters.stop_tokens(ChatTemplate(harmony, None, {}))) == {"<|end|>", "<|call|>", "<|return|>"}


MANY = ("[A]", "[B]", "[C]")


@pytest.mark.parametrize(
    ("end", "prompt", "ends"),
    [
        ("'[A]x[B]y[C]<|im_end|>\n'", PROMPT, ["[A]x[B]y[C]<|im_end|>"]),  # Kimi K3
        ("'[A]<|im_end|>'", "{{ '<|im_start|>assistant\n' }}", ["[A]<|im_end|>"]),  # Command A always writes its prompt
        ("'[A]<|im_end|>[B]'", PROMPT, ["[A]<|im_end|>"]),  # sampling stops there
        ("('[A][B]' if loop.last else '[C][B]')", PROMPT, ["[A][B]"]),  # how many tokens replace them is not told
    ],
)
def test_an_end_is_all_that_a_sampler_has_to_produce(end: str, prompt: str, ends: list[str]) -> None:
    delimiters = framed(template=turns(end=end, prompt=prompt), tokens=MANY, stops=("<|im_end|>",))
    assert list(delimiters.ends) == ends
    assert delimiters.end_of("so" + ends[0]) == ends[0]
    assert delimiters.end_of("so") == ""


def test_a_prompt_begins_with_a_whole_token() -> None:
    """Without a prompt Phi-3 writes another token there, whose first characters are the same."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"
    )
    delimiters = find_turn_delimiters(ChatTemplate(tiny_tokenizer("chatml", template=template), None, {}), SAY)
    assert delimiters.prompt == "<|assistant|>\n"


def test_a_frame_is_remembered_for_its_template_alone() -> None:
    tokenizer = tiny_tokenizer("chatml", marks=False)
    first = find_turn_delimiters(ChatTemplate(tokenizer, None, {}), SAY)
    assert find_turn_delimiters(ChatTemplate(tokenizer, None, {}), SAY) is first
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", "helper\n")
    assert find_turn_delimiters(ChatTemplate(tokenizer, None, {}), SAY).prompt == "<|im_start|>helper\n"
    assert find_turn_delimiters(ChatTemplate(tokenizer, None, {}, ("<|endoftext|>",)), SAY).stops[0] == "<|endoftext|>"


def test_stop_tokens_are_read_from_a_generation_config(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("harmony")
    ids = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    expected = ("<|return|>", "<|call|>")
    assert read_stop_tokens(tmp_path, tokenizer) == expected
    assert read_stop_tokens(str(tmp_path), tokenizer) == expected
    assert read_stop_tokens({"eos_token_id": ids}, tokenizer) == expected
    assert read_stop_tokens(SimpleNamespace(eos_token_id=ids[0]), tokenizer) == expected[:1]
    assert read_stop_tokens(tmp_path / "none", tokenizer) == ()
    assert read_stop_tokens({}, tokenizer) == ()


def test_stop_tokens_of_another_model_are_refused() -> None:
    tokenizer = tiny_tokenizer("chatml")
    assert tokens_as_text(["<|im_end|>", "<|im_end|>"], tokenizer) == ("<|im_end|>",)
    with pytest.raises(ValueError, match="another model's"):
        tokens_as_text([10**6], tokenizer)
    with pytest.raises(ValueError, match="not one token"):
        tokens_as_text(["<|eot_id|>"], tokenizer)


def test_where_sampling_of_a_turn_stops() -> None:
    """At the model's own stop tokens and at what the template ends turns with: gpt-oss has both, GLM none of these."""
    harmony = tiny_tokenizer("harmony", marks=False)
    assert set(turn_ends(harmony, ["<|return|>", "<|call|>"])) == {"<|return|>", "<|call|>", "<|end|>"}
    assert set(turn_ends(harmony)) == {"<|return|>", "<|call|>", "<|end|>"}
    glm = tiny_tokenizer("glm", marks=False)
    stops = glm.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert set(turn_ends(glm, stops)) == set(turn_ends(glm)) == {"<|user|>", "<|observation|>"}
    assert turn_ends(tiny_tokenizer("llama", marks=False), ["<|begin_of_text|>"]) == ("<|begin_of_text|>", "<|eot_id|>")
    with pytest.raises(ValueError, match="not one token"):
        turn_ends(glm, ["no token"])
