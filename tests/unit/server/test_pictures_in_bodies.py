"""Pictures in the bodies of all dialects become one form of part. Only pictures in the body itself are read."""

import pytest

from llamabatch.errors import LlamaBatchError
from llamabatch.server.anthropic.messages_body import read_messages
from llamabatch.server.http.errors import ApiError
from llamabatch.server.ollama.body import read_generate, read_ollama_chat
from llamabatch.server.request.body import Rules
from llamabatch.server.request.chat_body import read_chat

REFUSALS = (LlamaBatchError, ApiError)
SEES, BLIND = Rules(media=frozenset({"image"})), Rules()
ADDRESS = "data:image/png;base64,AAAA"
PART = {"type": "image_url", "image_url": ADDRESS}
TEXT = {"type": "text", "text": "What?"}


def user(*parts: dict, **more) -> dict:
    return {"messages": [{"role": "user", "content": list(parts), **more}]}


def anthropic(**source) -> dict:
    return {**user({"type": "image", "source": source}, TEXT), "max_tokens": 4}


BODIES = {
    "a chat": (read_chat, user({"type": "image_url", "image_url": {"url": ADDRESS}}, TEXT)),
    "a chat of texts of responses": (read_chat, user(PART, {"type": "input_text", "text": "What?"})),
    "messages": (read_messages, anthropic(type="base64", media_type="image/png", data="AAAA")),
    "ollama's chat": (
        read_ollama_chat,
        {"messages": [{"role": "user", "content": "What?", "images": ["AAAA"]}]},
    ),
    "ollama's generate": (read_generate, {"prompt": "What?", "images": ["AAAA"]}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_picture_is_one_form_of_part(name):
    read, body = BODIES[name]
    content = read(body, SEES).conversation[-1]["content"]
    found = [part for part in content if part["type"] != "text"]
    assert len(found) == 1
    assert found[0]["type"] == "image_url"
    assert found[0]["image_url"].startswith("data:image")
    assert found[0]["image_url"].endswith(";base64,AAAA")
    assert [part["text"] for part in content if part["type"] == "text"] == ["What?"]
    with pytest.raises(REFUSALS, match=r"cannot (be )?read|not supported"):
        read(body, BLIND)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image_pil", "image_pil": "/etc/hostname"},
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "image_url", "image_url": "/etc/hostname"},
        {"type": "image", "url": "http://127.0.0.1/a.png"},
        {"type": "input_image", "image_url": "http://127.0.0.1/a.png"},
        {"type": "image_url"},
    ],
)
@pytest.mark.parametrize("read", [read_chat, read_ollama_chat])
def test_no_file_is_read_and_nothing_is_fetched(read, part):
    with pytest.raises(REFUSALS, match=r"without allowed_local_media_path no file|has no image_url"):
        read(user(TEXT, part), SEES)
    for role in ("tool", "assistant"):
        history = {"messages": [{"role": role, "content": [part], "tool_call_id": "a"}, *user(TEXT)["messages"]]}
        with pytest.raises(REFUSALS, match=r"without allowed_local_media_path no file|has no image_url"):
            read(history, SEES)


def test_what_stands_beside_the_address_of_a_picture_is_left_out():
    content = read_chat(user({**PART, "image": "/etc/hostname", "source": None}), SEES).conversation[0]["content"]
    assert content == [PART]


def test_the_result_of_a_tool_may_be_a_picture():
    result = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body = {
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [result, TEXT]}]},
        ],
    }
    assert read_messages(body, SEES).conversation[-1]["content"] == [PART, TEXT]
