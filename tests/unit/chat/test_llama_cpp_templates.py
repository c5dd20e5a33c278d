"""The chat templates in llama.cpp's pinned source: their families, and tool calls in them.

A template that is not in VERDICTS has no thinking. The second word of a verdict is the state of the thinking at the
end of a prompt without variables.
"""

import tarfile

import pytest

from llamabatch.chat.conversation import render
from llamabatch.chat.formats import ChatFormat
from llamabatch.chat.options import ChatOptions
from llamabatch.native_build import source
from llamabatch.native_build.tools import cache_dir

VERDICTS = {
    "Apertus-8B-Instruct": ("apertus", "possible"),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "inside"),
    "Bielik-11B-v3.0-Instruct": ("qwen3", "possible"),
    "ByteDance-Seed-OSS": ("seed-oss", "possible"),
    "Cohere2MoE": ("cohere", "inside"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "over"),
    "GLM-4.6": ("glm-4.5", "possible"),
    "GLM-4.7-Flash": ("glm-4.5", "inside"),
    "HuggingFaceTB-SmolLM3-3B": ("think", "possible"),
    "Kimi-K2-Thinking": ("kimi-k2", "possible"),
    "LFM2.5-8B-A1B": ("think", "possible"),
    "LFM2.5-Instruct": ("think", "possible"),
    "MiniMax-M2": ("minimax-m2", "inside"),
    "MiniMax-M3": ("minimax-m3", "possible"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3", "inside"),
    "NVIDIA-Nemotron-Nano-v2": ("think", "inside"),
    "Qwen-QwQ-32B": ("think", "over"),
    "Qwen-Qwen3-0.6B": ("qwen3", "possible"),
    "Qwen3.5-4B": ("qwen3", "inside"),
    "Reka-Edge": ("think", "possible"),
    "Spark2.5": ("think", "inside"),
    "StepFun3.5-Flash": ("qwen3", "inside"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek-r1", "inside"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-r1", "over"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-r1", "over"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek-r1", "over"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek-r1", "over"),
    "deepseek-ai-DeepSeek-V4": ("deepseek-r1", "over"),
    "google-gemma-4-31B-it-interleaved": ("gemma-4", "over"),
    "google-gemma-4-31B-it": ("gemma-4", "over"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "possible"),
    "inclusionai-ling-3.0-flash": ("think", "inside"),
    "llama-cpp-deepseek-r1": ("deepseek-r1", "inside"),
    "llama-cpp-rwkv-world": ("think", "possible"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("magistral", "possible"),
    "openai-gpt-oss-120b": ("gpt-oss", "possible"),
    "openbmb-MiniCPM5-1B": ("think", "possible"),
    "poolside-Laguna-S-2.1": ("think", "inside"),
    "poolside-Laguna-XS-2.1": ("think", "over"),
    "poolside-Laguna-XS.2": ("think", "over"),
    "tencent-Hy3": ("hunyuan", "over"),
    "unsloth-Apriel-1.5": ("apriel", "possible"),
}
FOLDER = "/vendor/llama.cpp/models/templates/"
ASKED = [{"role": "user", "content": "hi <think>"}]


@pytest.fixture(scope="module")
def templates():
    package = cache_dir() / "sources" / source.FILE_NAME
    if not package.is_file():
        pytest.skip("the source of llama.cpp is not in the cache")
    found = {}
    with tarfile.open(package) as archive:
        for member in archive:
            if FOLDER in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[member.name.partition(FOLDER)[2].removesuffix(".jinja")] = file.read().decode()
    return found


def called(number, name, arguments):
    return {"id": f"call_{number:020d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(content, *calls):
    """Yields a message of the assistant, and the answers of its tools."""
    yield {"role": "assistant", "content": content, "tool_calls": list(calls)}
    for call in calls:
        name, number = call["function"]["name"], int(call["id"][5:])
        yield {"role": "tool", "tool_call_id": call["id"], "name": name, "content": f"answer-{number}-"}


READ, WRITE = (called(n, name, f'{{"path": "given-{n}-"}}') for n, name in enumerate(("read_it", "write_it")))
CUT = called(2, "write_it", '{"path" : "given-2-,')
HISTORIES = {
    "one call": [*turn(None, READ)],
    "text beside it": [*turn("Well.", READ)],
    "two turns": [*turn("", READ), *turn(None, WRITE), {"role": "assistant", "content": "Done."}, *ASKED],
    "two calls": [*turn(None, READ, WRITE)],
    "a cut call": [*turn(None, CUT)],
}
PATH = {"type": "object", "properties": {"path": {"type": "string", "description": "A file."}}, "required": ["path"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": PATH}}
    for name in ("read_it", "write_it")
]
NEEDS_FUNCTIONS = "fireworks-ai-llama-3-firefunction-v2"  # its template needs a variable that nobody passes


@pytest.mark.parametrize("history", HISTORIES)
def test_each_call_and_each_answer_is_shown_once(templates, history):
    messages = [*ASKED, *HISTORIES[history]]
    options = ChatOptions(tools=TOOLS)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    wrong = {}
    for name, template in templates.items():
        if name == NEEDS_FUNCTIONS:
            continue
        text = render(template, messages, "<s>", "</s>", options)
        behind = text[text.index(ASKED[0]["content"]) :]
        for call in calls:
            number = int(call["id"][5:])
            order = [behind.find(f"{each}-{number}-") for each in ("given", "answer")]
            counts = [text.count(f"{each}-{number}-") for each in ("given", "answer")]
            if counts != [1, 1] or order != sorted(order) or call["function"]["name"] not in behind:
                wrong[name] = (call, counts, order)
        shown = behind.replace('"is_error": null', "")  # Cohere's template writes this null itself
        if words := [word for word in ("None", "null", "{'") if word in shown]:
            wrong[name] = words
    assert not wrong


def test_the_verdict_on_each_template(templates):
    made = {}
    for name, template in templates.items():
        tags = ChatFormat.of(template).reasoning
        if tags is not None:
            made[name] = (tags.family, tags.at_end_of(render(template, ASKED, "<s>", "</s>")).value)
    assert made == VERDICTS
