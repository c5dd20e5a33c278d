"""Fields that a service may ignore are ignored and named in each dialect, or refused by a strict server."""

import json
import random
from dataclasses import replace

import pytest

from llamabatch.chat.conversation import render
from llamabatch.request.tool_calls import ToolCall
from llamabatch.server.anthropic.messages_body import read_messages
from llamabatch.server.http.errors import ApiError
from llamabatch.server.openai.custom_tools import CustomInput, input_of
from llamabatch.server.openai.responses_body import read_responses
from llamabatch.server.openai.responses_response import ResponseEvents, ResponseHead, response_document
from llamabatch.server.request.body import Rules
from llamabatch.server.request.chat_body import read_chat
from tests.unit.server.serving_clients import ready_client
from tests.unit.server.test_messages import pieces, whole
from tests.unit.server.test_responses import read, rebuilt

HELLO = [{"role": "user", "content": "one two three"}]
CHAT = ("/v1/chat/completions", {"messages": HELLO})
RESPONSES = ("/v1/responses", {"input": "one two three"})
MESSAGES = ("/v1/messages?beta=true", {"messages": HELLO, "max_tokens": 8})
COMPLETIONS = ("/v1/completions", {"prompt": "one two three"})

CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OWN_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}


def said(kind, **fields):
    """Returns a history with an item or a block of this type after a question."""
    return [*HELLO, {"type": kind, **fields}, *HELLO]


OPTIONAL = [
    (CHAT, {"verbosity": "low", "prediction": {"type": "content", "content": "x"}}, "prediction, verbosity"),
    (CHAT, {"web_search_options": {}, "media_io_kwargs": {"video": {}}}, "media_io_kwargs, web_search_options"),
    (CHAT, {"structured_outputs": {"json": {"format": "path"}}}, "structured_outputs.format:path"),
    (COMPLETIONS, {"structured_outputs": {"json": {"not": {}}, "lenient": True}}, "structured_outputs.not"),
    (CHAT, {"tools": [{"type": "web_search"}, CHAT_TOOL]}, "tools[0]:web_search"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0]:custom"),
    (CHAT, {"unheard_of": 1, "stream_options": {"other": 1}, "stream": True}, "stream_options.other, unheard_of"),
    (COMPLETIONS, {"n_cache_reuse": 256, "id_slot": 0, "n_indent": 4}, "id_slot, n_cache_reuse, n_indent"),
    (COMPLETIONS, {"samplers": ["temperature", "top_k", "tfs_z"]}, "samplers:tfs_z"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"response_fields": [""], "backend_sampling": True}, "backend_sampling, response_fields"),
    (RESPONSES, {"text": {"verbosity": "high"}, "include": ["all.of.it"]}, "include[0]:all.of.it, text.verbosity"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"tools": [OWN_TOOL, {"type": "image_generation"}]}, "tools[1]:image_generation"),
    (RESPONSES, {"tools": [{"type": "code_interpreter", "container": {}}]}, "tools[0]:code_interpreter"),
    (
        RESPONSES,
        {"tools": [{"type": "namespace", "name": "n", "tools": [OWN_TOOL, {"type": "web_search"}]}]},
        "tools[0].tools[1]:web_search",
    ),
    (
        RESPONSES,
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}, OWN_TOOL]}]},
        "tools[0].tools[0]:namespace",
    ),
    (
        CHAT,
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}, OWN_TOOL]}]},
        "tools[0].tools[0]:custom",
    ),
    (RESPONSES, {"input": said("web_search_call", status="completed")}, "input[1]:web_search_call"),
    (RESPONSES, {"input": said("compaction", encrypted_content="x")}, "input[1]:compaction"),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
                {"role": "assistant", "content": "A cat."},
                *HELLO,
            ]
        },
        "input[0].content[0]:input_image",
    ),
    (MESSAGES, {"mcp_servers": [{"url": "x"}], "container": "c1"}, "container, mcp_servers"),
    (MESSAGES, {"tools": [CLAUDE_TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1]:bash_20250124"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools[0]:web_search_20250305"),
    (
        MESSAGES,
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}, *HELLO]},
        "messages[1].content[0]:server_tool_use",
    ),
]


@pytest.fixture(scope="module")
def clients():
    server = {"chat_template": "chatml"}
    with ready_client(server=server) as usual, ready_client(server=server | {"strict": True}) as strict:
        yield usual, strict


@pytest.mark.parametrize(("endpoint", "fields", "names"), OPTIONAL, ids=[names for _, _, names in OPTIONAL])
def test_what_only_allows_is_ignored_by_name_or_refused_by_a_strict_server(clients, endpoint, fields, names):
    usual, strict = clients
    path, body = endpoint
    for stream in (True,) if "stream" in fields else (False, True):
        answer = usual.post(path, json={**body, **fields, "stream": stream})
        assert (answer.status_code, answer.headers["x-llamabatch-ignored"]) == (200, names), answer.text
        assert "three" in answer.text
        refused = strict.post(path, json={**body, **fields, "stream": stream})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert any(error["message"].count(name.partition(":")[0]) for name in names.split(", ")), error


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (CHAT, {"stop": 5}),
        (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        (COMPLETIONS, {"suffix": "x"}),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
        (RESPONSES, {"tools": [{"name": "f"}]}),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "b"}], "tool_choice": {"type": "tool", "name": "b"}}),
    ],
)
def test_what_changes_the_answer_is_refused_in_any_case(clients, endpoint, fields):
    path, body = endpoint
    for client in clients:
        assert client.post(path, json={**body, **fields}).status_code == 400


def test_betas_are_named_and_their_fields_are_read(clients):
    usual, strict = clients
    headers = {"anthropic-beta": "effort-2025-11-24,context-management-2025-06-27", "anthropic-version": "2023-06-01"}
    named = "anthropic-beta:context-management-2025-06-27, anthropic-beta:effort-2025-11-24"
    _, body = MESSAGES
    for path in ("/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"):
        answer = usual.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.headers["x-llamabatch-ignored"]) == (200, named)
        refused = strict.post(path, json=body, headers=headers)
        assert (refused.status_code, "effort-2025-11-24" in refused.text) == (400, True)
        assert strict.post(path, json=body).status_code == 200


FUNCTION = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "additionalProperties": False},
}
NAMESPACES = [
    FUNCTION,
    {"type": "namespace", "name": "near", "description": "Things here.", "tools": [FUNCTION, FUNCTION | {"name": "g"}]},
    {"type": "namespace", "name": "far", "tools": [FUNCTION]},
    {"type": "web_search", "external_web_access": False},
]


def test_functions_of_a_namespace_are_offered():
    body = read(tools=NAMESPACES)
    functions = [tool["function"] for tool in body.chat.options.tools]
    assert [(each["name"], each["description"]) for each in functions] == [
        ("look", "Looks."),
        ("near__look", "Things here.\n\nLooks."),
        ("near__g", "Looks."),
        ("far__look", "Looks."),
    ]
    assert all(each["parameters"] == FUNCTION["parameters"] for each in functions)
    assert body.chat.ignored == ("tools[3]:web_search",)
    assert [tool["type"] for tool in body.repeated["tools"]] == ["function", "namespace", "namespace"]
    chosen = read(tools=NAMESPACES, tool_choice={"type": "function", "namespace": "far", "name": "look"})
    assert chosen.chat.options.tool_choice == {"type": "function", "function": {"name": "far__look"}}


def test_a_namespace_in_a_namespace_comes_back_without_it_and_null_is_an_empty_one():
    inner = {"type": "namespace", "name": "m", "tools": [FUNCTION]}
    body = read(tools=[{"type": "namespace", "name": "n", "tools": [inner, FUNCTION]}, NAMESPACES[0]])
    assert [tool["function"]["name"] for tool in body.chat.options.tools] == ["n__look", "look"]
    assert [tool["name"] for tool in body.repeated["tools"][0]["tools"]] == ["look"]
    body = read(tools=[{"type": "namespace", "name": "n", "tools": None}, FUNCTION])
    assert [tool["function"]["name"] for tool in body.chat.options.tools] == ["look"]
    assert body.repeated["tools"][0] == {"type": "namespace", "name": "n", "tools": []}


NEEDS_ONE = r"names 'look', which is in several namespaces, near, far; give one of near__look, far__look"


def test_a_choice_may_leave_out_the_only_namespace_of_a_name():
    choice = {"type": "function", "name": "g"}
    chosen = {"type": "function", "function": {"name": "near__g"}}
    assert read(tools=NAMESPACES, tool_choice=choice).chat.options.tool_choice == chosen
    look = read(tools=NAMESPACES, tool_choice={"type": "function", "name": "look"})
    assert look.chat.options.tool_choice["function"] == {"name": "look"}  # the function without a namespace
    some = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    assert read(tools=NAMESPACES, tool_choice=some).chat.options.tool_choice["allowed_tools"]["tools"] == [chosen]
    with pytest.raises(ApiError, match=f"^tool_choice {NEEDS_ONE}") as error:
        read(tools=NAMESPACES[1:], tool_choice={"type": "function", "name": "look"})
    assert error.value.param == "tool_choice"


def test_a_chat_has_the_functions_of_namespaces():
    def chat(tools, **fields):
        return read_chat({"messages": HELLO, "tools": tools, **fields}, Rules())

    of_chat = {"type": "function", "function": {"name": "h", "description": "Helps.", "parameters": None}}
    body = chat([*NAMESPACES[1:], {"type": "namespace", "name": "own", "description": "Mine.", "tools": [of_chat]}])
    functions = {tool["function"]["name"]: tool["function"] for tool in body.options.tools}
    assert list(functions) == ["near__look", "near__g", "far__look", "own__h"]
    assert functions["near__look"]["parameters"] == FUNCTION["parameters"]
    assert functions["own__h"] == {"name": "own__h", "description": "Mine.\n\nHelps."}
    chosen = {"type": "function", "function": {"name": "g"}}
    own = {"type": "function", "function": {"name": "near__g"}}
    assert chat(NAMESPACES[1:], tool_choice=chosen).options.tool_choice == own
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [chosen]}}
    assert chat(NAMESPACES[1:], tool_choice=some).options.tool_choice["allowed_tools"]["tools"] == [own]
    with pytest.raises(ApiError, match=NEEDS_ONE):
        chat(NAMESPACES[1:], tool_choice={"type": "function", "function": {"name": "look"}})
    with pytest.raises(ApiError, match=r"tools\[0\]\.tools\[0\] is 3"):
        chat([{"type": "namespace", "name": "n", "tools": [3]}])


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "namespace", "tools": []}, r"tools\[0\]\.name is null"),
        ({"type": "namespace", "name": "n", "tools": {}}, r"tools\[0\]\.tools is \{\}"),
        ({"type": "namespace", "name": "n", "tools": [3]}, r"tools\[0\]\.tools\[0\] is 3"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}, r"tools\[0\]\.tools\[0\]\.name is null"),
        ({"type": "namespace", "name": "n", "description": 3, "tools": [FUNCTION]}, r"tools\[0\]\.description is 3"),
        (
            {"type": "namespace", "name": "n", "description": "", "tools": [FUNCTION | {"description": [None]}]},
            r"tools\[0\]\.tools\[0\]\.description is \[null\]",
        ),
        ({"type": "namespace", "name": "n", "tools": [FUNCTION, FUNCTION]}, "two functions of the name 'n__look'"),
    ],
)
def test_a_namespace_that_cannot_be_read_is_refused(tool, words):
    with pytest.raises(ApiError, match=words):
        read(tools=[tool])


def test_an_item_whose_type_is_no_text_is_refused():
    with pytest.raises(ApiError, match=r"input\[0\]\.type is"):
        read(input=[{"type": {}, "role": "user", "content": "x"}])


def test_a_called_function_comes_back_with_its_namespace_and_is_known_in_the_next_turn():
    calls = tuple(ToolCall(f"c{n}", name, '{"at": "x"}') for n, name in enumerate(("look", "near__look", "far__look")))
    output = whole("", None, calls)
    head = ResponseHead("1", "tiny", 5, read(tools=NAMESPACES))
    document = response_document(head, [output])
    assert [(item["name"], item.get("namespace")) for item in document["output"]] == [
        ("look", None),
        ("look", "near"),
        ("look", "far"),
    ]
    events = ResponseEvents(head)
    data = b"".join(events.feed(part) for part in pieces(output, random.Random(1))) + b"".join(events.end())
    assert rebuilt(data.decode())["output"] == document["output"]
    for event in data.decode().split("\n\n"):  # programs read the function from either event
        if "event: response.output_item." in event:
            item = json.loads(event.partition("data: ")[2])["item"]
            assert item.get("namespace") == {"c0": None, "c1": "near", "c2": "far"}[item["call_id"]]
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": "seen"} for n in range(3)]
    [_, answer, *_] = read(input=[*HELLO, *document["output"], *results], tools=NAMESPACES).chat.conversation
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["look", "near__look", "far__look"]


def test_calls_of_custom_tools_in_a_history_are_calls():
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    [_, answer, result] = read(input=[*HELLO, *items]).chat.conversation
    assert answer["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "a \\"b\\""}'}
    assert (result["role"], result["content"]) == ("tool", "done")


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def test_a_custom_tool_is_a_function_of_one_text():
    body = read(tools=[PATCH, {"type": "namespace", "name": "far", "tools": [{"type": "custom", "name": "say"}]}])
    functions = [tool["function"] for tool in body.chat.options.tools]
    assert [each["name"] for each in functions] == ["patch", "far__say"]
    assert (functions[0]["description"], functions[0]["strict"]) == ("Changes files.", True)
    assert functions[0]["parameters"]["properties"]["input"]["x-lark"] == "start: /.+/"
    assert functions[1]["parameters"]["properties"] == {"input": {"type": "string"}}
    regex = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    [tool] = read(tools=[{**PATCH, "format": regex}]).chat.options.tools
    assert tool["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert all(each["parameters"]["required"] == ["input"] for each in functions)
    assert (body.custom, body.repeated["tools"][0]) == ({"patch", "far__say"}, PATCH)
    chosen = read(tools=[PATCH], tool_choice={"type": "custom", "name": "patch"})
    assert chosen.chat.options.tool_choice == {"type": "function", "function": {"name": "patch"}}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("text", r"tools\[0\]\.format is 'text'"),
        ({"type": "json"}, r"tools\[0\]\.format\.type is 'json'"),
        ({"type": "grammar", "syntax": "ebnf"}, r"tools\[0\]\.format\.syntax is 'ebnf'"),
        ({"type": "grammar", "syntax": "regex"}, r"tools\[0\]\.format\.definition is null"),
    ],
)
def test_a_custom_tool_that_cannot_be_read_is_refused(form, words):
    with pytest.raises(ApiError, match=words):
        read(tools=[{**PATCH, "format": form}])


@pytest.mark.parametrize("text", ['*** Begin\n+a "b" \\ \u00e9 \U0001f600\n', ""])
def test_a_call_of_a_custom_tool_comes_back_as_its_text(text):
    for seed, arguments in enumerate((json.dumps({"input": text}), json.dumps({"input": text}, ensure_ascii=False))):
        output = whole("", None, (ToolCall("c0", "patch", arguments), ToolCall("c1", "look", '{"at": "x"}')))
        head = ResponseHead("1", "tiny", 5, read(tools=[PATCH, FUNCTION]))
        document = response_document(head, [output])
        call = {"type": "custom_tool_call", "call_id": "c0", "name": "patch", "input": text, "status": "completed"}
        assert document["output"][0] == {"id": "ctc_1_0", **call}
        events = ResponseEvents(head)
        data = b"".join(events.feed(part) for part in pieces(output, random.Random(seed))) + b"".join(events.end())
        given = [json.loads(event.partition("data: ")[2]) for event in data.decode().split("\n\n") if "{" in event]
        assert given[-1]["response"]["output"] == document["output"]
        of_call = [each for each in given if "custom_tool_call_input" in each["type"]]
        assert "".join(each["delta"] for each in of_call if "delta" in each) == text
        assert of_call[-1]["input"] == text
        [_, answer] = read(input=[*HELLO, document["output"][0]], tools=[PATCH]).chat.conversation
        assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"input": text}


@pytest.mark.parametrize("arguments", ['{"text": "a"}', '["a"]', '{"input": 3}', "a"])
def test_arguments_of_another_form_come_as_they_are(arguments):
    assert input_of(arguments) == arguments
    given = CustomInput()
    assert given.add(arguments) + given.end() == arguments


def test_a_cut_off_call_gives_the_text_so_far():
    assert input_of('{"input": "a\\nb\\') == "a\nb"


def part(text, kind="input_text"):
    return {"type": kind, "text": text}


# Fields of the first request of Codex 0.169 and of Claude Code 2.1, with our own texts.
CODEX = {
    "model": "any",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [part("Write code.")]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [part("Ask first."), part("Be safe.")]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [part("one two three")]},
    ],
    "tools": NAMESPACES,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
}
CACHED = {"cache_control": {"type": "ephemeral"}}
LINE = "x-anthropic-billing-header: cc_version=1; cch=5;"
CLAUDE = {
    "model": "any",
    "max_tokens": 32,
    "stream": True,
    "system": [part(LINE, "text"), part("Write code.", "text") | CACHED],
    "messages": [
        {"role": "user", "content": [part("one two three", "text") | CACHED]},
        {"role": "system", "content": "There are agents."},
    ],
    "tools": [
        {**CLAUDE_TOOL, "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}}
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


def test_the_first_requests_of_agents_are_answered(clients):
    usual, _ = clients
    assert usual.head("/").status_code == 200
    for path, body, names, end in (
        ("/v1/responses", CODEX, "client_metadata, tools[3]:web_search", "event: response.completed"),
        (
            "/v1/messages?beta=true",
            CLAUDE,
            "anthropic-beta:b-1, context_management, output_config.effort, system[0]:x-anthropic-billing-header",
            "event: message_stop",
        ),
    ):
        for stream in (False, True):
            answer = usual.post(path, json=body | {"stream": stream}, headers={"anthropic-beta": "b-1"})
            assert (answer.status_code, answer.headers["x-llamabatch-ignored"]) == (200, names), answer.text
            assert (end in answer.text) == stream


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"at": "x"}'}}
DONE, NEAR_LOOK = {"status": "completed"}, {"name": "look", "namespace": "near"}
SAID = {**part("I look.", "output_text"), "annotations": [], "logprobs": []}
USED = {"type": "tool_use", "id": "c1", "name": "f", "input": {"at": "x"}}
QWEN = {
    "model": "any",
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [CHAT_TOOL],
    "messages": [
        {"role": "system", "content": "Write code."},
        {"role": "user", "content": [part("one", "text"), part("two three", "text")]},
    ],
}
# The parts that each program adds in its second request: its answer with a call, and the result.
SECOND = [
    (
        read_responses,
        CODEX,
        "input",
        [
            DONE | {"type": "message", "id": "msg_4", "role": "assistant", "content": [SAID]},
            DONE | {"type": "function_call", "id": "fc_1", "call_id": "c1", "arguments": '{"at": "x"}'} | NEAR_LOOK,
            {"type": "function_call_output", "id": "o", "call_id": "c1", "output": [part("Took 1 s."), part("seen")]},
        ],
    ),
    (
        read_messages,
        CLAUDE,
        "messages",
        [
            {"role": "assistant", "content": [part("I look.", "text"), USED]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "seen"} | CACHED]},
        ],
    ),
    (
        read_chat,
        QWEN,
        "messages",
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [part("seen", "text")]},
        ],
    ),
]


@pytest.mark.parametrize(("reader", "first", "name", "more"), SECOND, ids=["codex", "claude", "qwen"])
def test_the_second_request_of_an_agent_begins_as_its_first(reader, first, name, more):
    def prompt(**changes):
        body = reader(first | changes)
        chat = body if reader is not read_responses else body.chat
        template = (
            "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.tool_calls }}]{% endfor %}"
        )
        return render(template, list(chat.conversation), "", "", replace(chat.options, template=template, kwargs={}))

    before = prompt()
    after = prompt(**{name: [*first[name], *more]})
    if reader is read_messages:  # the billing line and the place of the cache mark may change
        other = [{"type": "text", "text": LINE.replace("cch=5", "cch=6")}, *first["system"][1:]]
        assert prompt(system=other) == before
    assert after.startswith(before)
    assert "seen" in after[len(before) :]


def test_what_the_grammar_of_a_tool_does_not_enforce_is_named(clients):
    usual, strict = clients
    asked = {"model": "fake", "input": HELLO, "tools": [PATCH], "tool_choice": "required"}
    for stream in (False, True):
        answer = usual.post(RESPONSES[0], json=asked | {"stream": stream})
        assert (answer.status_code, answer.headers["x-llamabatch-ignored"]) == (200, "tools.grammar:patch.input")
    refused = strict.post(RESPONSES[0], json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert "tools.grammar:patch.input is 'patch.input', which has no effect" in refused.json()["error"]["message"]
    free = usual.post(RESPONSES[0], json={**asked, "tools": [{**PATCH, "format": {"type": "text"}}]})
    assert "x-llamabatch-ignored" not in free.headers


def test_null_is_an_empty_text_in_a_history(clients):
    usual, _ = clients
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": None}, call, {"type": "function_call_output", "call_id": "c", "output": None}]
    assert usual.post(RESPONSES[0], json={"model": "fake", "input": [*items, *HELLO]}).status_code == 200
    part = {"type": "text", "text": None}
    for path, _ in (CHAT, MESSAGES):
        answered = [{"role": "user", "content": [part]}, {"role": "assistant", "content": None}, *HELLO]
        body = {"model": "fake", "max_tokens": 4, "messages": answered}
        assert usual.post(path, json=body).status_code == 200
        missing = [{"role": "user", "content": [{"type": "text"}]}]
        assert usual.post(path, json=body | {"messages": missing}).status_code == 400
