"""Programs check our server against the specifications of OpenAI, Anthropic and OpenResponses.

Expected failures are listed with reasons. If one of these checks passes, the test fails, so that the lists stay
current.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.__main__ import ROOT

NODE = {"llmprobe": "0.6.12", "tsx": "4.23.15", "zod": "3.25.76"}  # from npm
CHECKOUT = "LLAMABATCH_OPENRESPONSES"
"""Names a checkout of github.com/openresponses/openresponses, whose program is in no registry."""
RUN_S = 300

IMAGE = "the model reads texts"
ANY_MODEL = "a body without a model is that of the one model, as in llama-server"
OWN_WILL = "the bundled model calls no tool of its own will"
STATELESS = "there is no WebSocket and no compaction"

LLM_COMPLY = {
    "open-responses": {"image-input": IMAGE, "error-handling": ANY_MODEL},
    "openai-chat": {"chat-image-input": IMAGE, "chat-error-handling": ANY_MODEL},
    "anthropic": {"anth-image-input": IMAGE},
}
OPENRESPONSES = {"image-input": IMAGE, "tool-calling": OWN_WILL} | dict.fromkeys(
    (
        "websocket-response",
        "websocket-sequential-responses",
        "websocket-continuation",
        "websocket-reconnect-store-false-recovery",
        "websocket-previous-response-not-found",
        "websocket-failed-continuation-evicts-cache",
        "websocket-compact-new-chain",
        "compact-response",
        "compact-missing-model",
    ),
    STATELESS,
)
LLMPROBE = {"responses-chain-remembers": "the bundled model repeats no name that it was told"}
# Part of the API -> least number of assertions. The others need answers that the bundled model does not always give.
PROBED = {
    "models": 4,
    "chat": 45,
    "responses": 45,
    "messages": 40,
    "count-tokens": 3,
    "embeddings": 3,
    "completions": 3,
}


def report(command, folder, **more):
    """Runs a program, and returns the JSON that it prints."""
    env = os.environ | {"HOME": str(folder)} | more
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=RUN_S)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """The folder where the packages of NODE are installed."""
    folder = ROOT / "build" / "test-server-node"
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no node and npm")
    marker, wanted = folder / "made", json.dumps(NODE)
    if not marker.exists() or marker.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        packages = [f"{name}@{version}" for name, version in NODE.items()]
        options = ["--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        cwd = tmp_path_factory.mktemp("npm")
        done = subprocess.run([npm, "install", *options, *packages], cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install {', '.join(packages)}: {done.stderr.strip()[-300:]}")
        marker.write_text(wanted)
    return folder / "node_modules"


def check_failures(results, known):
    """Checks that exactly the `known` ids fail. Each result has "id", "status" and perhaps "errors"."""
    failed = {each["id"]: each.get("errors") for each in results if each["status"] == "failed"}
    ran = {each["id"] for each in results if each["status"] != "skipped"}
    assert {name: errors for name, errors in failed.items() if name not in known} == {}
    assert sorted(name for name in known if name in ran and name not in failed) == []
    assert len(ran) > len(failed)


@pytest.mark.parametrize("form", sorted(LLM_COMPLY))
def test_llm_comply(url, form, tmp_path):
    command = [str(Path(sys.executable).with_name("llm-comply")), "--format", form, "--json", "-m", "tiny"]
    command += ["-u", f"{url}/v1", "-k", "none"]
    if form == "anthropic":
        command += ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
    check_failures(report(command, tmp_path)["results"], LLM_COMPLY[form])


def test_openresponses(url, node, tmp_path):
    named = os.environ.get(CHECKOUT)
    if named is None:
        pytest.skip(f"{CHECKOUT} names no checkout of github.com/openresponses/openresponses")
    for part in ("bin", "src/lib", "src/generated"):
        shutil.copytree(Path(named, part), tmp_path / part)
    (tmp_path / "node_modules").symlink_to(node)
    command = [str(node / ".bin" / "tsx"), "bin/compliance-test.ts", "-u", f"{url}/v1", "-k", "none", "-m", "tiny"]
    check_failures(report([*command, "--json"], tmp_path)["results"], OPENRESPONSES)


def test_llmprobe(url, node, tmp_path):
    command = ["node", str(node / "llmprobe" / "bin" / "dist" / "llmprobe.mjs"), url, "-m", "tiny"]
    found = report([*command, "--no-bench", "--no-save", "--json"], tmp_path)["conformance"]
    failed = {
        failure["id"]: failure["message"]
        for each in found["results"]
        if each["outcome"] == "fail"
        for failure in each["failures"]
    }
    assert {name: why for name, why in failed.items() if name not in LLMPROBE} == {}
    surfaces = {each["surface"]: (each["passed"], each["total"]) for each in found["bySurface"]}
    assert [name for name, least in PROBED.items() if surfaces.get(name, (0, 0))[1] < least] == []
