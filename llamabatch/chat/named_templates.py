"""llama.cpp's named chat templates (src/llama-chat.cpp), written in jinja2.

These templates are for models whose file has no template or a wrong one. llama.cpp writes the same prompts in C++ code.
A test compares the prompts of both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping


def _turns(parts: Mapping[str, tuple[str, str]], opening: str, *, trim: bool = False, start: str = "") -> str:
    """Returns a template that writes texts around each message. The texts depend only on the role.

    Args:
        parts: {role: the texts before and after the content}. {role} in a text becomes the role. The role "" means all
            other roles.
        opening: text that opens the answer.
        trim: remove the white space around each content.
        start: text at the start of the prompt.
    """
    content = "message['content'] | trim" if trim else "message['content']"
    cases = []
    for role, (before, after) in parts.items():
        written = [_literal(before), content if not trim else f"({content})", _literal(after)]
        test = f"elif message['role'] == {_literal(role)}" if role else "else"
        cases.append(f"{{% {test} %}}{{{{ {' + '.join(written)} }}}}")
    choice = "{% if false %}" + "".join(cases) + "{% endif %}"
    loop = f"{{% for message in messages %}}{choice}{{% endfor %}}"
    return f"{_write(start)}{loop}{{% if add_generation_prompt %}}{_write(opening)}{{% endif %}}"


def _literal(text: str) -> str:
    parts = [json.dumps(part, ensure_ascii=False) for part in text.split("{role}")]
    return " + message['role'] + ".join(parts)


def _write(text: str) -> str:
    return f"{{{{ {_literal(text)} }}}}" if text else ""


def _named(user: tuple[str, str], assistant: tuple[str, str], system: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return {"system": system, "user": user, "assistant": assistant}


_COMMAND_R = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
_GEMMA = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% set ns.system = ns.system + message['content'] | trim %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{% if ns.system and message['role'] != 'assistant' %}{{ ns.system + '\\n\\n' }}{% set ns.system = '' %}{% endif %}"
    "{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

DEFAULT = "chatml"  # llama-server's choice for a model without a template (common_chat_templates_init)
IN_PYTHON, ON_A_LINE = f'chat_template="{DEFAULT}"', f"--chat-template {DEFAULT}"
TEMPLATES: dict[str, str] = {
    "chatml": _turns({"": ("<|im_start|>{role}\n", "<|im_end|>\n")}, "<|im_start|>assistant\n"),
    "command-r": _turns(
        _named(
            (_COMMAND_R.format("USER"), "<|END_OF_TURN_TOKEN|>"),
            (_COMMAND_R.format("CHATBOT"), "<|END_OF_TURN_TOKEN|>"),
            (_COMMAND_R.format("SYSTEM"), "<|END_OF_TURN_TOKEN|>"),
        ),
        _COMMAND_R.format("CHATBOT"),
        trim=True,
    ),
    "chatglm4": _turns({"": ("<|{role}|>\n", "")}, "<|assistant|>\n", start="[gMASK]<sop>"),
    "deepseek": _turns(
        _named(("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n"), ("", "")), "### Response:\n"
    ),
    "deepseek2": _turns(
        _named(("User: ", "\n\n"), ("Assistant: ", "<｜end▁of▁sentence｜>"), ("", "\n\n")), "Assistant:"
    ),
    "deepseek3": _turns(
        _named(("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"), ("", "\n\n")), "<｜Assistant｜>"
    ),
    "exaone3": _turns(
        _named(("[|user|]", "\n"), ("[|assistant|]", "[|endofturn|]\n"), ("[|system|]", "[|endofturn|]\n")),
        "[|assistant|]",
        trim=True,
    ),
    "falcon3": _turns({"": ("<|{role}|>\n", "\n")}, "<|assistant|>\n"),
    "gemma": _GEMMA,
    "llama3": _turns(
        {"": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")},
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        trim=True,
    ),
    "openchat": _turns(
        _named(
            ("GPT4 Correct User: ", "<|end_of_turn|>"),
            ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
            ("", "<|end_of_turn|>"),
        ),
        "GPT4 Correct Assistant:",
    ),
    "phi3": _turns({"": ("<|{role}|>\n", "<|end|>\n")}, "<|assistant|>\n"),
    "phi4": _turns({"": ("<|im_start|>{role}<|im_sep|>", "<|im_end|>")}, "<|im_start|>assistant<|im_sep|>"),
    "vicuna": _turns(_named(("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), ("", "\n\n")), "ASSISTANT:"),
    "vicuna-orca": _turns(_named(("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), ("SYSTEM: ", "\n")), "ASSISTANT:"),
    "zephyr": _turns({"": ("<|{role}|>\n", "<|endoftext|>\n")}, "<|assistant|>\n"),
}
