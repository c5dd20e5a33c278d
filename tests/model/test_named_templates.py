"""Chat templates by name are those of llama.cpp."""

import ctypes

import llama_cpp
import pytest

from llamabatch.chat.conversation import render
from llamabatch.chat.named_templates import TEMPLATES
from llamabatch.chat.options import ChatOptions

CONVERSATIONS = [
    [("user", "Hello")],
    [("system", " Be brief.\n"), ("user", " Hi {{ x }} \n"), ("assistant", " Yes? "), ("user", "Why")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
]


def of_llama_cpp(name, conversation, opens):
    turns = [llama_cpp.llama_chat_message(role.encode(), content.encode()) for role, content in conversation]
    given = (llama_cpp.llama_chat_message * len(turns))(*turns)
    buffer = ctypes.create_string_buffer(4096)
    size = llama_cpp.llama_chat_apply_template(name.encode(), given, len(turns), opens, buffer, len(buffer))
    assert 0 <= size < len(buffer), name
    return buffer.raw[:size].decode()


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_llama_cpp(name):
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in conversation]
        for opens in (True, False):
            options = ChatOptions(add_generation_prompt=opens)
            assert render(TEMPLATES[name], messages, "", "", options) == of_llama_cpp(name, conversation, opens)
