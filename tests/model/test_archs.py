"""Thirty of the architectures that llama.cpp can write, alone and in a batch. `make test-archs` runs all."""

import pytest

from llamabatch.native_build.tools import SetupFailure
from tests.archs import models, running, table

# some of each kind, the popular ones, and those that a patch of ours corrects
SAMPLE = [
    "llama", "qwen2", "qwen3", "qwen3moe", "gpt2", "gptneox", "phi2", "gemma4", "bloom", "stablelm", "granite", "glm4",
    "olmoe", "gpt-oss", "gemma2", "gemma3", "cohere2", "exaone4", "llama4", "deepseek2", "glm5-next", "mamba", "mamba2",
    "jamba", "lfm2", "granitehybrid", "qwen3next", "rwkv7", "plamo2", "cogvlm",
]  # fmt: skip


def test_thirty_architectures_alone_and_in_company(tmp_path):
    try:
        paths = models.write(tmp_path, SAMPLE)
    except SetupFailure as error:
        pytest.skip(f"no models: {error}")
    assert {path.stem.rpartition("-")[0] for path in paths} == set(SAMPLE)
    results = running.run(paths)
    assert table.failures(results) == []
    rows = table.lines(results)[2:]
    assert len(rows) > 8
    in_document = {name: line for line in table.committed()[2:] for name in line.split(" | ")[1].split(", ")}
    for row in rows:
        kind, names, *holds = row.strip("| ").split(" | ")
        for name in names.split(", "):
            assert in_document[name].strip("| ").split(" | ")[2:] == holds, f"{name}: make test-archs ARGS=--write"
            assert in_document[name].startswith(f"| {kind} |")
