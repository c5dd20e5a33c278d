"""llama.cpp's own server tests against ours: the program between them, and the record of the ids that fail."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llamabatch.native_build import source
from tests.server_peer import expectations
from tests.server_peer.llama_server import translated
from tests.server_peer.suite import ASIDE

REPOSITORY = Path(__file__).parents[3]
MODELS = {"": "/any.gguf", "org/stories": "/stories.gguf", "org/models/bert/f16.gguf": "/bert.gguf"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--port", "1", "--offline", "--hf-repo", "org/stories"], ["--model", "/stories.gguf", "--port", "1"]),
        (["--hf-repo", "org/models", "--hf-file", "bert/f16.gguf", "--jinja"], ["--model", "/bert.gguf", "--jinja"]),
        (["--mmproj-url", "https://x", "--temp", "0.8"], ["--model", "/any.gguf", "--temp", "0.8"]),
        (["--model", "mine.gguf", "--hf-repo", "org/stories"], ["--model", "mine.gguf"]),
    ],
)  # fmt: skip
def test_options_of_a_hub_become_a_local_file(given, wanted):
    assert translated(given, MODELS) == wanted


def test_a_model_without_a_local_file_is_named():
    with pytest.raises(KeyError, match="org/large"):
        translated(["--hf-repo", "org/large"], MODELS)


def test_the_program_becomes_the_server(tmp_path):
    table = tmp_path / "peer.json"
    code = "import os, sys; print(os.environ['SEEN'], sys.argv[1:])"
    record = {"command": [sys.executable, "-c", code], "environment": {"SEEN": "yes"}, "models": MODELS}
    table.write_text(json.dumps(record))
    program = REPOSITORY / "tests" / "server_peer" / "llama_server.py"
    done = subprocess.run(
        [sys.executable, program, "--hf-repo", "org/stories", "--slots"],
        env={"LLAMABATCH_PEER": str(table)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "yes ['--model', '/stories.gguf', '--slots']\n"


def test_a_run_is_compared_with_the_expected_failures():
    found = expectations.compare(
        ["a", "b", "c", "d", "e"],
        {"a": "passed", "b": "failed", "c": "failed", "d": "passed"},
        {"c": "why", "d": "why"},
    )
    assert found.passed == ["a", "d"]
    assert found.failed == ["b", "c"]
    assert (found.unexpected, found.cured, found.missing) == (["b"], ["d"], ["e"])
    assert not found.is_exact
    assert expectations.compare(["a", "c"], {"a": "passed", "c": "skipped"}, {"c": "why"}).is_exact


def test_the_record_is_of_the_source_that_we_build_from():
    record = expectations.read_passed()
    assert record["llama_cpp_python"] == source.VERSION
    assert re.fullmatch("[0-9a-f]{40}", record["llama.cpp"])
    assert record["aside"] == ASIDE
    assert len(record["ids"]) == len(set(record["ids"])) > 200
    assert not [name for name in record["ids"] if name.startswith(tuple(ASIDE))]


def test_nine_in_ten_pass_and_each_failure_has_its_reason():
    ids, failures = expectations.read_passed()["ids"], expectations.read_failures()
    assert set(failures) <= set(ids)
    assert not [reason for reason in failures.values() if reason.startswith("not known") or len(reason) < 20]
    assert len(failures) <= len(ids) / 10


def test_the_documentation_has_the_figures():
    assert expectations.table() in (REPOSITORY / "docs" / "serve.md").read_text(encoding="utf-8")
