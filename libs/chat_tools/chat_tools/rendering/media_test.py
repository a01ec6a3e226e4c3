from typing import Any

import pytest

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.media import Media, expand, grid_tokens, images, videos
from chat_tools.rendering.render import render
from chat_tools.testing.tokenizer import tiny_tokenizer

TEMPLATE = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{%- for part in m.content -%}
{{- {'image': '<|image_pad|>', 'video': '<|video_pad|>'}[part.type] if part.type != 'text' else part.text -}}
{%- endfor -%}{{- '<|im_end|>' -}}
{%- endif -%}{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
SEEN: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}],
}
TALK: list[dict[str, Any]] = [
    SEEN,
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": [{"type": "image"}]},
]


@pytest.mark.parametrize("marks", [True, False])
def test_placeholders_expand_and_the_mask_moves_along(marks: bool) -> None:
    tokenizer = tiny_tokenizer("chatml", marks, TEMPLATE)
    film = "<1.0 s>" + "<|video_pad|>" * 2 + "<2.0 s>" + "<|video_pad|>" * 2
    rendered = render(tokenizer, TALK, media=[images([3, 2]), videos([film])])
    assert rendered.text == (
        f"<|im_start|>user\n{'<|image_pad|>' * 3}and{film}<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        f"<|im_start|>user\n{'<|image_pad|>' * 2}<|im_end|>\n"
    )
    assert rendered.problems == ()
    image, video = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    assert rendered.mm_token_type_ids == [{image: 1, video: 2}.get(i, 0) for i in rendered.ids]
    assert [rendered.mm_token_type_ids.count(kind) for kind in (1, 2)] == [5, 4]
    trained = [i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m]
    assert tokenizer.decode(trained) == "hello<|im_end|>"
    assert [rendered.text[s.start : s.end] for s in rendered.spans] == ["hello<|im_end|>"]


def test_an_image_in_a_tool_result_of_a_running_conversation() -> None:
    tokenizer = tiny_tokenizer("chatml", template=TEMPLATE)
    rendered = render(tokenizer, [SEEN], add_generation_prompt=True, media=[images([4]), videos([2])])
    sampled = tokenizer("look<|im_end|>")["input_ids"]
    longer = extend(rendered.generated(sampled), TALK[2:], media=[images([6])])
    whole: list[dict[str, Any]] = [SEEN, {"role": "assistant", "content": "look"}, TALK[2]]
    again = render(tokenizer, whole, add_generation_prompt=True, media=[images([4, 6]), videos([2])])
    assert (longer.text, longer.mm_token_type_ids) == (again.text, again.mm_token_type_ids)
    assert longer.assistant_mask == again.assistant_mask


@pytest.mark.parametrize("counts", [[1], [1, 2, 3]])
def test_a_wrong_number_of_images_is_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="one expansion for each"):
        expand("<|image_pad|> <|image_pad|>", [images(counts)])


def test_a_placeholder_that_is_no_token_is_refused() -> None:
    tokenizer = tiny_tokenizer("chatml", template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="one of the tokenizer's"):
        render(tokenizer, [{"role": "user", "content": "a <pic>"}], media=[Media("<pic>", [2])])


def test_tokens_of_a_grid() -> None:
    assert grid_tokens((2, 8, 6)) == 24
    with pytest.raises(ValueError, match="merge_size=2"):
        grid_tokens((1, 3, 4))
