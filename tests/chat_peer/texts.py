"""The texts that llama.cpp parses: well-formed calls in each notation, and the texts of the unit tests."""

from llamabatch.chat import tool_parsers
from llamabatch.chat.tool_formats import FORMATS, written
from tests.unit.chat.tool_texts import BROKEN, CASES, NO_CALLS

# Family -> a template in models/templates/ of llama.cpp's source, from which llama.cpp chooses the parser. Seed-OSS is
# left out: its template cannot show a parameter of several types, and the tools here have such parameters.
TEMPLATES = {
    "hermes": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3-coder": "Qwen3-Coder",
    "glm-4.5": "GLM-4.6",
    "glm-4.7": "GLM-4.7-Flash",
    "llama-3": "meta-llama-Llama-3.1-8B-Instruct",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-v11": "Mistral-Small-3.2-24B-Instruct-2506",
    "mistral-v13": "unsloth-mistral-Devstral-Small-2507",
    "deepseek-v3": "llama-cpp-deepseek-r1",
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "kimi-k2": "moonshotai-Kimi-K2",
    "gpt-oss": "openai-gpt-oss-120b",
}
FAMILY_OF = {
    tool_parsers.hermes: "hermes",
    tool_parsers.qwen3_coder: "qwen3-coder",
    tool_parsers.glm: "glm-4.5",
    tool_parsers.bare_json: "llama-3",
    tool_parsers.mistral: "mistral-v11",
    tool_parsers.deepseek: "deepseek-v3.1",
    tool_parsers.kimi: "kimi-k2",
    tool_parsers.harmony: "gpt-oss",
}
OSLO = ("weather", {"city": "Oslo", "days": 3})
ODD = ("weather", {"city": 'A "b"\n<c>\\ é🌧', "detail": None, "unit": "F"})
CLOCK = ("clock", {})


def well_formed() -> list[tuple[str, str]]:
    """Returns pairs of a family and a text in its notation: one call, a call after text, odd characters, two calls."""
    pairs = []
    for each in FORMATS:
        if each.name not in TEMPLATES:
            continue
        kinds = [written(each, [OSLO]), written(each, [ODD]), written(each, [CLOCK])]
        # llama-3 allows no text before a call; gpt-oss has text in a message of its own
        if each.name not in ("llama-3", "gpt-oss"):
            kinds.append("Well.\n" + kinds[0])
            if getattr(each.notation, "between", "") is not None:
                kinds.append(written(each, [OSLO, CLOCK]))
        if each.name == "mistral":  # llama.cpp expects ids in calls, because the template writes them in earlier turns
            kinds = [
                text.replace("}}", '}, "id": "123456789"}').replace("{}}", '{}, "id": "123456789"}') for text in kinds
            ]
        pairs += [(each.name, text) for text in dict.fromkeys(kinds)]
    return [*pairs, *((name, "No call: 1 < 2.") for name in TEMPLATES if name != "gpt-oss")]


def others() -> list[tuple[str, str]]:
    """Returns pairs of a family and a text of the unit tests: variants of calls, broken calls, texts without calls."""
    texts = [(case.reader, case.given) for case in CASES] + list(NO_CALLS) + [(each[0], each[1]) for each in BROKEN]
    known = set(well_formed())
    return [
        (FAMILY_OF[reader], text)
        for reader, text in texts
        if reader in FAMILY_OF and (FAMILY_OF[reader], text) not in known
    ]
