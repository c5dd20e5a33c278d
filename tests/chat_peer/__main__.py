"""Lets llama.cpp parse the texts, and writes the results to parses.json.

    python -m tests.chat_peer

It compiles the parser of llama-server (parts of llama.cpp's libcommon) from the pinned source, in a temporary folder,
and links it with the installed libllama. This takes a minute or two, and needs a C++ compiler.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llamabatch.native_build import source
from tests.chat_peer.texts import TEMPLATES, others, well_formed
from tests.unit.chat.tool_texts import TOOLS

HERE = Path(__file__).parent
PARSES = HERE / "parses.json"
_FILES = (
    *("chat.cpp", "chat-auto-parser-generator.cpp", "chat-auto-parser-helpers.cpp", "chat-diff-analyzer.cpp"),
    *("chat-peg-parser.cpp", "peg-parser.cpp", "json.cpp", "json-schema.cpp", "json-schema-to-grammar.cpp", "log.cpp"),
    *("common.cpp", "unicode.cpp", "trie.cpp", "reasoning-budget.cpp"),
)
_INCLUDES = ("-Icommon", "-Iinclude", "-Iggml/include", "-Ivendor", "-Isrc")


def build(tree: Path, folder: Path) -> Path:
    """Compiles the program in `folder`, and returns its path. Raises CalledProcessError."""
    import llama_cpp

    common = tree / "common"
    files = (
        [common / name for name in _FILES] + sorted(common.glob("jinja/*.cpp")) + sorted(common.glob("parsers/*.cpp"))
    )
    files.append(HERE / "chat_parse.cpp")
    libraries = Path(llama_cpp.__file__).parent / "lib"

    def compiled(file: Path) -> Path:
        made = folder / f"{file.parent.name}-{file.stem}.o"
        flags = ["-std=c++17", "-O1", "-ffunction-sections", "-fdata-sections", *_INCLUDES]
        subprocess.run(["c++", *flags, "-c", str(file), "-o", str(made)], cwd=tree, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, files))
    program = folder / "chat_parse"
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama", "-lggml", "-lggml-base", "-lpthread"]
    subprocess.run(["c++", *map(str, objects), "-o", str(program), "-Wl,--gc-sections", *linked], check=True)
    return program


def ask(program: Path, templates: Path, pairs: list[tuple[str, str]]) -> list[dict[str, object]]:
    """Returns the parses of texts, each with its family and text."""
    tools = [
        {"type": "function", "function": {"name": name, "description": "It helps.", "parameters": _typed(schema)}}
        for name, schema in TOOLS.items()
    ]
    sources = {name: (templates / f"{file}.jinja").read_text(encoding="utf-8") for name, file in TEMPLATES.items()}
    common = {"tools": tools, "parallel": True, "reasoning": True, "tool_choice": "auto"}
    begins = _answers(program, [{"template": sources[name], "text": "", **common} for name in sources])
    # If the prompt opens the thinking, </think> before the text ends the thinking at once.
    opened = {name for name, each in zip(sources, begins, strict=True) if "<think>" in str(each)}
    asked = [
        {"template": sources[name], "text": ("</think>" if name in opened else "") + text, **common}
        for name, text in pairs
    ]
    parses = []
    for (name, text), found in zip(pairs, _answers(program, asked), strict=True):
        kept = {"error": "…"} if "error" in found else {key: found[key] for key in ("content", "tool_calls")}
        parses.append({"family": name, "text": text, **kept})
    return parses


def _typed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema that all templates can show: each property has a type."""
    properties = {key: {"type": "string", **value} for key, value in schema.get("properties", {}).items()}
    return {"type": "object", **schema, "properties": properties}


def _answers(program: Path, asked: list[dict[str, object]]) -> list[dict[str, object]]:
    lines = "".join(json.dumps(each) + "\n" for each in asked)
    done = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tree = source.unpack(source.fetch(folder / "log"), folder) / "vendor" / "llama.cpp"
        program = build(tree, folder)
        made = {
            "version": source.VERSION,
            "well_formed": ask(program, tree / "models" / "templates", well_formed()),
            "others": ask(program, tree / "models" / "templates", others()),
        }
    PARSES.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(made['well_formed']) + len(made['others'])} parses in {PARSES}")


if __name__ == "__main__":
    sys.exit(main())
