"""The families that are found in llama.cpp's own chat templates, which stand in the source of the pinned build.

None: no thinking is looked for. The second word is the state of the thinking behind a question without variables.
"""

import tarfile

import pytest

from llamabatch.chat.conversation import render
from llamabatch.chat.formats import ChatFormat
from llamabatch.native_build import source
from llamabatch.native_build.tools import cache_dir

VERDICTS = {
    "Apertus-8B-Instruct": ("apertus", "possible"),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "inside"),
    "Bielik-11B-v3.0-Instruct": ("qwen3", "possible"),
    "ByteDance-Seed-OSS": ("seed-oss", "possible"),
    "Cohere2MoE": ("cohere", "inside"),
    "CohereForAI-c4ai-command-r-plus-tool_use": None,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "over"),
    "GLM-4.6": ("glm-4.5", "possible"),
    "GLM-4.7-Flash": ("glm-4.5", "inside"),
    "GigaChat3-10B-A1.8B": None,
    "GigaChat3.1-10B-A1.8B": None,
    "HuggingFaceTB-SmolLM3-3B": ("think", "possible"),
    "Kimi-K2-Instruct": None,
    "Kimi-K2-Thinking": ("kimi-k2", "possible"),
    "Kimi-K3": None,
    "LFM2-8B-A1B": None,
    "LFM2.5-8B-A1B": ("think", "possible"),
    "LFM2.5-Instruct": ("think", "possible"),
    "MiMo-VL": None,
    "MiniMax-M1": None,
    "MiniMax-M2": ("minimax-m2", "inside"),
    "MiniMax-M3": ("minimax-m3", "possible"),
    "Mistral-Small-3.2-24B-Instruct-2506": None,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3", "inside"),
    "NVIDIA-Nemotron-Nano-v2": ("think", "inside"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": None,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": None,
    "Qwen-QwQ-32B": ("think", "over"),
    "Qwen-Qwen2.5-7B-Instruct": None,
    "Qwen-Qwen3-0.6B": ("qwen3", "possible"),
    "Qwen3-Coder": None,
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
    "fireworks-ai-llama-3-firefunction-v2": None,
    "google-gemma-2-2b-it": None,
    "google-gemma-4-31B-it-interleaved": ("gemma-4", "over"),
    "google-gemma-4-31B-it": ("gemma-4", "over"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "possible"),
    "ibm-granite-granite-4.0": None,
    "ibm-granite-granite-4.1": None,
    "inclusionai-ling-3.0-flash": ("think", "inside"),
    "llama-cpp-deepseek-r1": ("deepseek-r1", "inside"),
    "llama-cpp-rwkv-world": ("think", "possible"),
    "meetkai-functionary-medium-v3.1": None,
    "meetkai-functionary-medium-v3.2": None,
    "meta-llama-Llama-3.1-8B-Instruct": None,
    "meta-llama-Llama-3.2-3B-Instruct": None,
    "meta-llama-Llama-3.3-70B-Instruct": None,
    "microsoft-Phi-3.5-mini-instruct": None,
    "mistralai-Ministral-3-14B-Reasoning-2512": ("magistral", "possible"),
    "mistralai-Mistral-Nemo-Instruct-2407": None,
    "moonshotai-Kimi-K2": None,
    "muse-glimmer": None,
    "openai-gpt-oss-120b": ("gpt-oss", "possible"),
    "openbmb-MiniCPM5-1B": ("think", "possible"),
    "poolside-Laguna-S-2.1": ("think", "inside"),
    "poolside-Laguna-XS-2.1": ("think", "over"),
    "poolside-Laguna-XS.2": ("think", "over"),
    "tencent-Hy3": ("hunyuan", "over"),
    "unsloth-Apriel-1.5": ("apriel", "possible"),
    "unsloth-mistral-Devstral-Small-2507": None,
    "upstage-Solar-Open-100B": None,
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


def test_the_verdict_on_each_template(templates):
    made = {}
    for name, template in templates.items():
        tags = ChatFormat.of(template).reasoning
        made[name] = None
        if tags is not None:
            made[name] = (tags.family, tags.at_end_of(render(template, ASKED, "<s>", "</s>")).value)
    assert made == VERDICTS
