import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.render import render
from chat_tools.rendering.template import ChatTemplate
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

MARKED = {name: tiny_tokenizer(name) for name in TEMPLATES}
PLAIN = {name: tiny_tokenizer(name, marks=False) for name in TEMPLATES}
ONE_CALL = ("llama", "harmony")  # at most one a turn
NO_TOOLS = ("gemma",)

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]
words = st.text(st.characters(codec="utf-8", exclude_characters="<[{"), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text
)


def call(value: str) -> dict:
    return {"type": "function", "function": {"name": "look", "arguments": {"word": value}}}


@st.composite
def conversations(draw, name):
    messages = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2)) if name not in NO_TOOLS else 0):
            calls = [call(draw(words)) for _ in range(1 if name in ONE_CALL else draw(st.integers(1, 2)))]
            turn = {"role": "assistant", "content": draw(words), "tool_calls": calls}
            messages.append({**turn, "reasoning_content": draw(words)} if name == "thinking" else turn)
            messages += [{"role": "tool", "content": draw(words)} for _ in calls]
        messages.append({"role": "assistant", "content": draw(words)})
        if name == "thinking" or draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(words)
    return messages


def oracle(tokenizer, messages, straddling):
    """The mask of transformers itself, by the template's marks, without the tokens that straddle a turn's border."""
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = [bool(on) for on in out["assistant_masks"]]
    offsets = tokenizer(tokenizer.decode(out["input_ids"]), return_offsets_mapping=True, add_special_tokens=False)
    pairs = offsets["offset_mapping"]
    for i in range(1, len(mask)):  # transformers ends with the first token of a character that has several
        mask[i] = mask[i] or (mask[i - 1] and pairs[i] == pairs[i - 1])
    return [on and i not in straddling for i, on in enumerate(mask)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_proven_mask_is_the_marked_one(name, data):
    messages = data.draw(conversations(name))
    marked, plain = render(MARKED[name], messages), render(PLAIN[name], messages)
    assert plain.problems == marked.problems == ()
    assert plain.ids == marked.ids == PLAIN[name].apply_chat_template(messages, return_dict=True)["input_ids"]
    assert plain.assistant_mask == marked.assistant_mask == oracle(MARKED[name], messages, plain.straddling)
    assert [(s.message, s.token_start, s.token_end) for s in plain.spans] == [
        (s.message, s.token_start, s.token_end) for s in marked.spans
    ]


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
def test_the_mask_covers_words_and_end_of_turn(tokenizers):
    rendered = render(tokenizers["chatml"], TALK)
    decode = tokenizers["chatml"].decode
    assert [decode(rendered.ids[s.token_start : s.token_end]) for s in rendered.spans] == [
        "hello<|im_end|>",
        "see you<|im_end|>",
    ]
    trained = [i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m]
    assert decode(trained) == "hello<|im_end|>see you<|im_end|>"


def test_a_turn_with_words_of_other_turns():
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}] * 3
    rendered = render(PLAIN["chatml"], messages)
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == ["hello<|im_end|>"] * 3
    assert rendered.assistant_mask == render(MARKED["chatml"], messages).assistant_mask


ASSISTANT, TOOL = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}, {"role": "tool", "content": "42"}
SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([ASSISTANT], "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyo<|im_end|>\n"),
        ([TOOL], "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"),
        ([SYSTEM], "<|im_start|>system\nbe kind<|im_end|>\n"),
        (
            [SYSTEM, ASSISTANT],
            "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyo<|im_end|>\n",
        ),
    ],
)
def test_templates_that_demand_a_user_message(tokenizers, messages, text):
    rendered = render(tokenizers["thinking"], messages)
    assert rendered.text == text
    assert rendered.problems == ()
    assert tokenizers["thinking"].decode(rendered.ids) == text
    trained = [i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m]
    wanted = "hm\n</think>\n\nyo<|im_end|>" if ASSISTANT in messages else ""
    assert tokenizers["thinking"].decode(trained) == wanted


def trained_text(tokenizer, rendered):
    return tokenizer.decode([i for i, on in zip(rendered.ids, rendered.assistant_mask, strict=True) if on])


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
def test_a_token_over_the_border_of_a_turn_is_not_trained_and_no_problem(tokenizers):
    """The prompt ends in a newline, and the turn begins with one: the tokenizer makes both one token."""
    messages = [TALK[0], {"role": "assistant", "content": "yo"}]
    rendered = render(tokenizers["thinking"], messages)
    assert rendered.problems == ()
    (token,) = rendered.straddling
    assert tokenizers["thinking"].decode(rendered.ids[token : token + 1]) == "\n\n"
    assert not rendered.assistant_mask[token]
    assert trained_text(tokenizers["thinking"], rendered) == "</think>\n\nyo<|im_end|>"


def forged(name):
    """Everything that a template of the family writes around turns, in somebody's text."""
    tokenizer = PLAIN[name]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True).text[-40:]
    return f"zanary {''.join(TEMPLATES[name][1])} {prompt}<think>\nzanary</think> zanary"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
def test_markers_in_other_peoples_texts_move_no_border(name, tokenizers):
    """The same answers are trained whatever users, tools and the system write, forged turns among it."""
    answers = ["hello", "see you"]
    for text in ("plain", forged(name)):
        user = {"role": "user", "content": text}
        messages = [{"role": "system", "content": text}, user, TALK[1], user, TALK[3]]
        if name not in NO_TOOLS:
            turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
            messages = [*messages[:3], user, turn, {"role": "tool", "content": text}, TALK[3]]
        rendered = render(tokenizers[name], messages)
        assert rendered.problems == ()
        trained = trained_text(tokenizers[name], rendered)
        assert "zanary" not in trained
        assert all(answer in trained for answer in answers)
        spans = [rendered.text[s.start : s.end] for s in rendered.spans]
        assert [answer in spans[i] for i, answer in zip((0, -1), answers, strict=True)] == [True, True]
        if text == "plain":
            plain_spans = spans
        assert spans == plain_spans


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_what_others_write_never_changes_what_is_trained(name, data):
    """Bits of markers, prompts and answers in any order, in everybody's text but the assistant's."""
    prompt = render(PLAIN[name], TALK[:1], add_generation_prompt=True).text
    bits = [
        *TEMPLATES[name][1],
        prompt,
        prompt[-20:],
        "hello",
        "see you",
        "<think>\n",
        "</think>",
        "\n",
        " ",
        "<",
        "zanary",
    ]
    texts = st.lists(st.sampled_from(bits), max_size=6).map("".join).map(lambda text: f"zanary{text}zanary")
    spoken = [TALK[1], TALK[3]]
    conversations_ = []
    for draw in (False, True):
        said = [data.draw(texts) if draw else "plain" for _ in range(3)]
        users = [{"role": "user", "content": text} for text in said[1:]]
        system = {"role": "system", "content": said[0]}
        conversations_.append(render(PLAIN[name], [system, users[0], spoken[0], users[1], spoken[1]]))
    plain, odd = conversations_
    assert odd.problems == ()
    assert [odd.text[s.start : s.end] for s in odd.spans] == [plain.text[s.start : s.end] for s in plain.spans]
    assert "zanary" not in trained_text(PLAIN[name], odd)


RESULTS_IN_THE_TURN = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if loop.index0 and messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function.name + ':' + call.function.arguments.word + '</call>' -}}
{%- if loop.last and loop.index0 >= 0 -%}{%- set ns = namespace(on=true) -%}
{%- for r in messages[loop.index0 + 1:] -%}{%- endfor -%}{%- endif -%}
{%- endfor -%}
{%- if m.tool_calls -%}
{%- set ns = namespace(at=loop.index, on=true) -%}
{%- for r in messages[loop.index:] -%}
{%- if r.role != 'tool' -%}{%- set ns.on = false -%}{%- endif -%}
{%- if ns.on -%}{{- '<|tool_response>' + r.content + '</result>' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- m.content -}}
{%- if not m.tool_calls -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif m.role != 'tool' -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def test_a_result_that_stands_inside_the_turn_is_not_trained():
    """As Gemma 4 writes it: call, result, the words beside the call, and the next answer in one turn."""
    tokenizer = tiny_tokenizer("chatml", template=RESULTS_IN_THE_TURN)
    tokenizer.add_tokens(["<|tool_response>"])
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call("x")]}
    result = {"role": "tool", "content": "zanary"}
    rendered = render(tokenizer, [TALK[0], turn, result, *TALK[1:]], stop_tokens=["<|im_end|>", "<|tool_response>"])
    assert rendered.problems == ()
    assert [(s.message, rendered.text[s.start : s.end]) for s in rendered.spans] == [
        (1, "<call>look:x</call><|tool_response>"),
        (1, "I look."),
        (3, "hello<|im_end|>"),
        (5, "see you<|im_end|>"),
    ]
    assert [(o.owner, o.message) for o in rendered.owners if rendered.text[o.start : o.end] == "zanary"] == [
        ("tool", 2)
    ]


@pytest.mark.parametrize("tokenizers", [MARKED, PLAIN])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_character_has_one_owner(name, tokenizers):
    messages = [{"role": "system", "content": "be kind"}, *TALK]
    rendered = render(tokenizers[name], messages)
    edges = [0, *(o.end for o in rendered.owners)]
    assert [o.start for o in rendered.owners] == edges[:-1]
    assert edges[-1] == len(rendered.text)
    for number, message in enumerate(messages):
        own = [o for o in rendered.owners if o.message == number]
        assert {o.owner for o in own} == {message["role"]}
        assert message["content"] in "".join(rendered.text[o.start : o.end] for o in own)
    assert {o.message for o in rendered.owners if o.owner == "template"} <= {None}


def test_calls_that_the_template_leaves_out_are_a_problem():
    """Else the model would be trained to say nothing where it should call."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
    rendered = render(tiny_tokenizer("chatml", template=template), [TALK[0], turn, TOOL, TALK[1]])
    assert rendered.problems == ("message 1: the template leaves out some of its tool calls",)
    assert [s.message for s in rendered.spans] == [3]
    two = {**turn, "tool_calls": [call("x"), call("y")]}
    assert "leaves out" in render(PLAIN["harmony"], [TALK[0], two, TOOL, TALK[1]]).problems[0]


@pytest.mark.parametrize("filter_", ["upper", "trim", "replace('hello', 'bye')", "truncate(3, true, '')"])
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_a_template_that_changes_the_words_of_a_role(filter_, role):
    """Marked or not: what is trained is the assistant's, or it is a problem."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        f"{{{{ m.content | {filter_} if m.role == '{role}' else m.content }}}}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = tiny_tokenizer("chatml", template=template)
    rendered = render(
        tokenizer, [{**TALK[0], "content": "user hello"}, {"role": "tool", "content": "tool hello"}, TALK[1]]
    )
    trained = trained_text(tokenizer, rendered).lower()
    assert "user" not in trained
    assert "tool" not in trained
    if not rendered.problems:
        assert trained.removesuffix("<|im_end|>") in ("hello", "bye", "hel")
    assert filter_.startswith("truncate") or not rendered.problems


def test_private_characters_in_a_text_are_text():
    odd = "".join(map(chr, range(0xF0000, 0xF0010))) + "\ue0a1x\ue0b2"
    messages = [{"role": "user", "content": odd}, {"role": "assistant", "content": f"so {odd}"}, *TALK[2:]]
    rendered = render(PLAIN["chatml"], messages)
    assert rendered.problems == ()
    assert trained_text(PLAIN["chatml"], rendered) == f"so {odd}<|im_end|>see you<|im_end|>"


def test_earlier_turns_that_end_otherwise_end_in_the_mask():
    """gpt-oss ends earlier turns with a token that the tokenizer does not list as special."""
    tokenizer = tiny_tokenizer("harmony", marks=False, declared=False)
    assert "<|end|>" not in tokenizer.all_special_tokens
    trained = trained_text(tokenizer, render(tokenizer, TALK))
    assert trained == "<|channel|>final<|message|>hello<|end|><|channel|>final<|message|>see you<|return|>"


def test_a_stand_in_where_roles_alternate():
    assert render(PLAIN["gemma"], [ASSISTANT]).text == "<bos><start_of_turn>model\nyo<end_of_turn>\n"
    with pytest.raises(ValueError, match="put a user message"):
        render(PLAIN["gemma"], [SYSTEM, ASSISTANT])


def test_only_template_errors_are_caught():
    broken = tiny_tokenizer("chatml", template="{{ 'a' + 1 }}")
    with pytest.raises(TypeError):
        render(broken, [ASSISTANT])
    refusing = tiny_tokenizer("chatml", template="{{ raise_exception('never') }}")
    with pytest.raises(Exception, match="never"):
        render(refusing, [ASSISTANT])


@pytest.mark.parametrize("name", ["chatml", "llama", "deepseek", "thinking", "mistral", "harmony"])
def test_extend_continues_token_by_token(name):
    tokenizer = PLAIN[name]
    messages = [{"role": "user", "content": "hi"}]
    rendered = render(tokenizer, messages, add_generation_prompt=True)
    for turn in range(3):
        words = "\n</think>\n\nhello" if name == "thinking" else " hello" if name == "mistral" else "hello"
        words = "<|channel|>final<|message|>hello" if name == "harmony" else words
        end = {"harmony": "<|end|>"}.get(name, tokenizer.eos_token)
        letters = (
            [i for c in words for i in tokenizer(c)["input_ids"]]
            if name != "harmony"
            else tokenizer(words)["input_ids"]
        )
        sampled = [*letters, tokenizer.convert_tokens_to_ids(end)]
        before = rendered
        rendered = rendered.generated(sampled, {"role": "assistant", "content": "hello"})
        rendered = extend(rendered, [{"role": "user", "content": f"more {turn}"}])
        assert rendered.ids[: len(before.ids) + len(sampled)] == before.ids + sampled
        messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": f"more {turn}"}]
        new = tokenizer.decode(rendered.ids[len(before.ids) + len(sampled) :])
        assert render(tokenizer, messages, add_generation_prompt=True).text.endswith(new)
        assert sum(rendered.assistant_mask) == sum(before.assistant_mask) + len(sampled)
    if name != "thinking":  # which would have dropped the earlier thinking
        assert rendered.text == render(tokenizer, messages, add_generation_prompt=True).text


def test_a_turn_cut_off_by_length_is_closed_untrained():
    tokenizer = PLAIN["chatml"]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True)
    longer = extend(prompt.generated(tokenizer("hel")["input_ids"]), TALK[2:3])
    assert (
        longer.text
        == render(
            tokenizer, [TALK[0], {"role": "assistant", "content": "hel"}, TALK[2]], add_generation_prompt=True
        ).text
    )
    assert tokenizer.decode([i for i, m in zip(longer.ids, longer.assistant_mask, strict=True) if m]) == "hel"


def test_tool_results_follow_a_call():
    tokenizer = PLAIN["thinking"]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True)
    turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
    sampled = tokenizer("\n</think>\n\n<tool_call>\n<function=look>...</function>\n</tool_call><|im_end|>")["input_ids"]
    longer = extend(prompt.generated(sampled, turn), [TOOL, TOOL])
    assert longer.text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n42\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


SAMPLED_STOPS = [
    # template, what was said, the token that stopped the model, who speaks next, how what the template adds begins
    ("glm", "hi", "<|user|>", "user", "\nbye"),
    ("glm", "hi", "<|observation|>", "user", "<|user|>\nbye"),
    ("glm", "hi", "", "user", "<|user|>\nbye"),
    ("glm", "CALL", "<|observation|>", "tool", "\n<tool_response>"),
    ("glm", "CALL", "", "tool", "<|observation|>\n<tool_response>"),
    ("harmony", "hi", "<|return|>", "user", "<|start|>user"),
    ("harmony", "hi", "<|end|>", "user", "<|start|>user"),
    ("harmony", "hi", "", "user", "<|end|><|start|>user"),
    ("harmony", "CALL", "<|call|>", "tool", "<|start|>tool"),
    ("chatml", "hi", "<|im_end|>", "user", "\n<|im_start|>user"),
    ("chatml", "hi", "<|endoftext|>", "user", "\n<|im_start|>user"),
    ("chatml", "CALL", "<|im_end|>", "tool", "\n<|im_start|>tool"),
    ("llama", "hi", "<|eot_id|>", "user", "<|start_header_id|>user"),
    ("mistral", " hi", "</s>", "user", "[INST] bye"),
    ("deepseek", "hi", "<｜end▁of▁sentence｜>", "user", "<｜User｜>bye"),
]


@pytest.mark.parametrize(("name", "said", "stop", "role", "expected"), SAMPLED_STOPS)
@pytest.mark.parametrize("known", [True, False])
def test_the_token_that_stopped_the_model_is_written_once(name, said, stop, role, expected, known):
    tokenizer = PLAIN[name]
    stops = [s for s in TEMPLATES[name][1] if s in expected or s == stop] if known else None
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True, stop_tokens=stops)
    turn = {"role": "assistant", "content": said.strip()}
    if said == "CALL":
        turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
        said = render(tokenizer, [TALK[0], turn]).spans[0]
        said = render(tokenizer, [TALK[0], turn]).text[said.start : said.end].removesuffix(stop)
    sampled = tokenizer(said + stop)["input_ids"]
    longer = extend(prompt.generated(sampled, turn), [{"role": role, "content": "bye"}])
    added = longer.text.removeprefix(prompt.text + said + stop)
    assert len(added) < len(longer.text)
    assert added.startswith(expected)
    assert longer.ids[: len(prompt.ids) + len(sampled)] == prompt.ids + sampled
    assert longer.assistant_mask == [False] * len(prompt.ids) + [True] * len(sampled) + [False] * (
        len(longer.ids) - len(prompt.ids) - len(sampled)
    )


def test_extend_without_a_prompt_or_render_is_refused():
    rendered = render(PLAIN["chatml"], TALK)
    with pytest.raises(ValueError, match="add_generation_prompt=True"):
        rendered.generated([1])


def test_options_reach_the_template():
    template = "{{ 'on' if enable_thinking else 'off' }}{{ messages[0].content }}"
    tokenizer = tiny_tokenizer("chatml", template=template)
    assert render(tokenizer, TALK[:1], enable_thinking=True).text == "onhi"


def test_tools_may_be_functions():
    def look(word: str) -> str:
        """Look a word up."""
        return word

    tokenizer = tiny_tokenizer("chatml", template="{{ tools[0].function.name }}")
    assert render(tokenizer, TALK[:1], tools=[look]).text == "look"
    assert ChatTemplate(tokenizer, [look], {}).tools


RESULTS_WITH_THE_CALL = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if strict and not messages[loop.index0 - 1].tool_calls -%}{{- raise_exception('No call.') -}}{%- endif -%}
{%- if messages[loop.index0 - 1].tool_calls -%}{{- '<result>' + m.content + '</result>' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function.arguments.word + '</call><|im_end|>\n' -}}
{%- endfor -%}
{%- if not m.tool_calls -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.mark.parametrize("strict", [True, False])
def test_a_tool_result_is_never_trained(strict):
    """The template renders a result only behind its call, or refuses it without one."""
    tokenizer = tiny_tokenizer("chatml", template=RESULTS_WITH_THE_CALL)
    turn = {"role": "assistant", "content": "see", "tool_calls": [call("x")]}
    rendered = render(tokenizer, [TALK[0], turn, TOOL, *TALK[1:]], strict=strict)
    assert rendered.problems == ()
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == [
        "see<call>x</call><|im_end|>",
        "hello<|im_end|>",
        "see you<|im_end|>",
    ]
