"""A model without a chat template: each command says so before it loads the model, and the server uses ChatML."""

import json
import logging

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from llamabatch import LLM, ConfigError
from llamabatch.chat.named_templates import TEMPLATES
from llamabatch.cli import cli
from llamabatch.gguf.resolve import resolve
from llamabatch.server.application import app
from tests.unit.server.test_application import ready

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
ADVICE = "this model has no chat template; give --chat-template chatml, or the template of its family"
CHAT = ["--chat", "--prompt", "{{ prompt }}"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The bundled model without a chat template: its metadata key is renamed."""
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    path.write_bytes(resolve("tiny").read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX"))
    return path


@pytest.fixture
def unloaded(monkeypatch):
    """Lets the test fail if a model is loaded."""

    def refuse(config):
        raise AssertionError("a model is loaded")

    for module in ("entrypoints.llm", "jobs.job"):
        monkeypatch.setattr(f"llamabatch.{module}.connect", refuse)


def invoke(*arguments, **more):
    result = CliRunner().invoke(cli, [str(each) for each in arguments], **more)
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("command", [("chat",), ("generate", "--chat", "Hi")], ids=["chat", "generate"])
def test_a_command_ends_before_the_load(base, unloaded, command):
    code, output = invoke(*command, "-m", base, input="Hi")
    assert (code, ADVICE in output) == (2, True), output


@pytest.mark.parametrize("lines", ["prompts", "messages"])
def test_a_job_ends_before_the_load_and_leaves_nothing(base, unloaded, lines, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.csv"
    row = {"prompt": "Hi"} if lines == "prompts" else {"messages": ASKED}
    given.write_text(f"{json.dumps(row)}\n" * 30)
    options = CHAT if lines == "prompts" else []
    for more in ([], ["--dry-run"]):
        code, output = invoke("run", given, out, "-m", base, *options, *more)
        assert (code, ADVICE in output) == (2, True), output
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_job_with_a_template_runs(base, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
    code, output = invoke("run", given, out, "-m", base, *CHAT, "--chat-template", "chatml", "-n", "4")
    assert (code, len(out.read_text().splitlines())) == (0, 2), output


def test_the_plan_says_so(base):
    code, output = invoke("plan", "-m", base)
    assert (code, f"Chats: {ADVICE}." in output) == (0, True), output
    assert json.loads(invoke("plan", "-m", base, "--json")[1])["lacks_template"] is True
    assert "chat template" not in invoke("plan", "-m", "tiny")[1]


def test_the_library_names_its_argument(base):
    with LLM(base, n_slots=1) as llm:
        assert 'chat_template = None: this model has no chat template; give chat_template="chatml"' in (
            llm.plan.describe()
        )
        with pytest.raises(ConfigError, match='no chat template; give chat_template="chatml", or'):
            llm.chat(ASKED, {"max_tokens": 1})
        [output] = llm.chat(ASKED, {"max_tokens": 1}, chat_template="chatml")
        assert output.prompt == f"<|im_start|>user\n{ASKED[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_the_server_takes_chatml_after_one_warning(base, caplog):
    with caplog.at_level(logging.WARNING, "llamabatch"), TestClient(app(base, isolate=False, n_slots=1)) as client:
        ready(client)
        body = {"messages": ASKED, "max_tokens": 2, "temperature": 0}
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert client.post(path, json=body).status_code == 200
        assert client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).status_code == 200
        prompt = client.post("/apply-template", json={"messages": ASKED}).json()["prompt"]
        assert prompt.startswith("<|im_start|>user\n")
        assert client.get("/props").json()["chat_template"] == TEMPLATES["chatml"]
    warnings = [record.getMessage() for record in caplog.records if "chat template" in record.getMessage()]
    assert warnings == ["base has no chat template: chats take chatml (--chat-template gives another)"]
