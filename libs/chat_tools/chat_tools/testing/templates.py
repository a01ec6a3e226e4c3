"""Chat templates in the manner of the model families, with the assistant's words marked: the oracle for masks."""

from __future__ import annotations

# Every template asks the same two macros for a message's calls.
_CALLS = """
{%- macro name(call) -%}{{ (call.function if call.function is defined else call).name }}{%- endmacro -%}
{%- macro arguments(call) -%}
{%- set given = (call.function if call.function is defined else call).arguments -%}
{{- given if given is string else given | tojson -}}
{%- endmacro -%}
"""

CHATML = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{%- generation -%}{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + name(call) + '", "arguments": ' + arguments(call) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Thinks in every new turn, forgets the thinking of earlier ones, demands a user, joins tool results.
THINKING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if ns.last < 0 -%}{{- raise_exception('There is no user message.') -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('The system message has to be the first.') -}}{%- endif -%}
{{- '<|im_start|>system\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'user' -%}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' -}}{%- endif -%}
{%- generation -%}
{%- if loop.index0 > ns.last -%}{{- (m.reasoning_content or '') + '\n</think>\n\n' -}}{%- endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n<function=' + name(call) + '>\n' -}}
{%- for key, value in (call.function if call.function is defined else call).arguments | items -%}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}{%- endgeneration -%}{{- '\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""

LLAMA = """
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' -}}
{%- if m.role == 'assistant' -%}
{%- generation -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length > 1 -%}{{- raise_exception('One call at a time.') -}}{%- endif -%}
{{- '{"name": "' + name(m.tool_calls[0]) + '", "parameters": ' + arguments(m.tool_calls[0]) + '}' -}}
{%- else -%}{{- m.content | trim -}}{%- endif -%}
{{- '<|eot_id|>' -}}{%- endgeneration -%}
{%- else -%}{{- m.content | trim + '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

# No header before an answer; users and assistants have to take turns; the system's words go into the first question.
MISTRAL = """
{{- bos_token -}}
{%- set ns = namespace(system='', user=true) -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}
{%- elif m.role == 'user' -%}
{%- if not ns.user -%}{{- raise_exception('Users and assistants take turns.') -}}{%- endif -%}
{%- set ns.user = false -%}{{- '[INST] ' + ns.system + m.content + '[/INST]' -}}{%- set ns.system = '' -%}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' -}}{%- set ns.user = false -%}
{%- elif m.role == 'assistant' -%}
{%- if ns.user -%}{{- raise_exception('Users and assistants take turns.') -}}{%- endif -%}
{%- set ns.user = not m.tool_calls -%}
{%- generation -%}
{%- if m.tool_calls -%}{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{{- '{"name": "' + name(call) + '", "arguments": ' + arguments(call) + '}' + ('' if loop.last else ', ') -}}
{%- endfor -%}{{- ']' -}}
{%- else -%}{{- ' ' + m.content -}}{%- endif -%}
{{- '</s>' -}}{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
"""

# The assistant is called model; a turn ends with its own marker; the system's words go into the first question.
GEMMA = """
{{- bos_token -}}
{%- set ns = namespace(system='', user=true) -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}
{%- elif m.role == 'assistant' -%}
{%- if ns.user -%}{{- raise_exception('Roles alternate.') -}}{%- endif -%}{%- set ns.user = true -%}
{{- '<start_of_turn>model\n' -}}{%- generation -%}{{- m.content | trim -}}
{%- for call in m.tool_calls or [] -%}
{{- '<start_function_call>call:' + name(call) + '{' -}}
{%- for key, value in (call.function if call.function is defined else call).arguments | items -%}
{{- key + ':' + ('<escape>' + value + '<escape>' if value is string else value | tojson) -}}
{{- '' if loop.last else ',' -}}
{%- endfor -%}{{- '}<end_function_call>' -}}
{%- endfor -%}
{{- '<end_of_turn>' -}}{%- endgeneration -%}{{- '\n' -}}
{%- else -%}
{%- if not ns.user -%}{{- raise_exception('Roles alternate.') -}}{%- endif -%}{%- set ns.user = false -%}
{{- '<start_of_turn>user\n' + ns.system + m.content | trim + '<end_of_turn>\n' -}}{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

# A turn has no end marker of its own: the token with which the next one begins ends it, and is the model's.
GLM = """
{{- '[gMASK]<sop>' -}}
{%- for m in messages -%}
{%- set begun = loop.previtem is defined and loop.previtem.role == 'assistant' -%}
{%- if m.role == 'tool' -%}
{{- ('' if begun else '<|observation|>') + '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|assistant|>\n' -}}{%- generation -%}{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>' + name(call) + '\n' -}}
{%- for key, value in (call.function if call.function is defined else call).arguments | items -%}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
{{- (value if value is string else value | tojson) + '</arg_value>\n' -}}
{%- endfor -%}{{- '</tool_call>' -}}
{%- endfor -%}
{%- if loop.nextitem is defined -%}
{{- '<|' + ('observation' if loop.nextitem.role == 'tool' else loop.nextitem.role) + '|>' -}}
{%- endif -%}{%- endgeneration -%}
{%- else -%}{{- ('' if begun else '<|' + m.role + '|>') + '\n' + m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
"""

DEEPSEEK = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'tool' -%}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<｜Assistant｜>' -}}{%- generation -%}{{- m.content or '' -}}
{%- if m.tool_calls -%}{{- '<｜tool▁calls▁begin｜>' -}}
{%- for call in m.tool_calls -%}
{{- '<｜tool▁call▁begin｜>' + name(call) + '<｜tool▁sep｜>' + arguments(call) + '<｜tool▁call▁end｜>' -}}
{%- endfor -%}{{- '<｜tool▁calls▁end｜>' -}}{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""

# One message may be several, each with a channel; the last answer ends with another marker than earlier ones.
HARMONY = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|start|>assistant' -}}{%- generation -%}
{%- if m.reasoning_content -%}
{{- '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant' -}}
{%- endif -%}
{%- if m.tool_calls -%}
{{- '<|channel|>commentary to=functions.' + name(m.tool_calls[0]) + ' <|constrain|>json<|message|>' -}}
{{- arguments(m.tool_calls[0]) + '<|call|>' -}}
{%- else -%}
{{- '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
{%- endif -%}{%- endgeneration -%}
{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# name: template, special tokens (the first pads and, where the template asks for one, begins; the last ends a turn)
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (_CALLS + CHATML, _CHATML_TOKENS),
    "thinking": (_CALLS + THINKING, _CHATML_TOKENS),
    "llama": (_CALLS + LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": (
        _CALLS + MISTRAL,
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
    "gemma": (
        _CALLS + GEMMA,
        ("<bos>", "<start_of_turn>", "<start_function_call>", "<end_function_call>", "<end_of_turn>"),
    ),
    "glm": (_CALLS + GLM, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")),
    "deepseek": (
        _CALLS + DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    ),
    "harmony": (
        _CALLS + HARMONY,
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"),
    ),
}
