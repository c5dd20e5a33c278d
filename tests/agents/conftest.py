"""A server with forced answers, and the programs that use it, each with a home directory of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llamabatch.chat.tool_formats import FORMATS, written
from tests.agents.__main__ import AGENTS, OPEN_WEBUI, ROOT, without_open_webui
from tests.browser.__main__ import browser

collect_ignore_glob = [] if AGENTS in os.environ else ["test_*.py"]

PAGE = ROOT / "docs" / "agents.md"
PORT = 8080  # the port of the page; it is free, because the tests have a network namespace of their own
WAIT_S = 600
HERMES = next(each for each in FORMATS if each.name == "hermes")
Call = tuple[str, Mapping[str, Any]]


@dataclass
class Record:
    """A request that the server has answered."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int | None
    answer_headers: dict[str, str]
    answer: str
    whole: bool

    @property
    def ignored(self) -> str:
        return self.answer_headers.get("x-llamabatch-ignored", "")

    def usage(self) -> tuple[int, int]:
        """Returns the number of tokens of the prompt, and how many of them came from the prefix cache."""
        found = re.findall(r'"(?:prompt|input)_tokens": ?(\d+)', self.answer)
        cached = re.findall(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)', self.answer)
        return int(found[-1]) + (int(cached[-1]) if self.path == "/v1/messages" else 0), int(cached[-1])


class Server:
    """`llamabatch serve` with forced answers.

    Args:
        folder: gets the script, the records and the log.
        options: options of the command.
    """

    def __init__(self, folder: Path, *options: str, port: int = PORT) -> None:
        self.folder = folder
        self.port = port
        self.script("", [], "Hello")
        command = [sys.executable, "-m", "tests.agents.forced", str(folder), *options]
        command += ["--port", str(port), "--data-dir", str(folder / "data")]
        self._log = (folder / "log").open("wb")
        self._child = subprocess.Popen(command, env=os.environ, stdout=self._log, stderr=subprocess.STDOUT)
        until = time.monotonic() + WAIT_S
        while not self._get("/readyz"):
            is_alive = self._child.poll() is None and time.monotonic() < until
            assert is_alive, (folder / "log").read_text()
            time.sleep(0.1)

    def close(self) -> None:
        self._child.terminate()
        self._child.wait(60)
        self._log.close()

    def script(self, needs: str, turns: list[tuple[str, str]], otherwise: str = "A title") -> None:
        """Writes the answers for tests/agents/forced.py, and deletes the records of earlier requests."""
        text = json.dumps({"needs": needs, "turns": turns, "else": otherwise})
        (self.folder / "script.json").write_text(text)
        (self.folder / "bodies.jsonl").unlink(missing_ok=True)

    @property
    def records(self) -> list[Record]:
        path = self.folder / "bodies.jsonl"
        return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def turns(self, program: Program) -> list[Record]:
        """Returns the records of requests that have tools, or the text `needs` of a program without tools. Requests
        for a title of the conversation have neither."""
        return [each for each in self.records if "tools" in each.body or program.needs in json.dumps(each.body)]

    def n_running(self) -> int:
        """Returns the number of requests that have a slot."""
        return sum(slot["is_processing"] for slot in self._slots())

    def n_decoding(self) -> int:
        """Returns the number of requests in slots that have generated tokens."""
        return sum(slot["is_processing"] and slot["next_token"][0]["n_decoded"] > 0 for slot in self._slots())

    def _slots(self) -> list[Any]:
        slots: list[Any] = json.loads(self._get("/slots"))
        return slots

    def _get(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
                found: bytes = response.read()
                return found
        except (urllib.error.URLError, OSError):
            return b""


def calls(*made: Call) -> str:
    """Returns an answer that calls functions."""
    return written(HERMES, made)


def sections() -> dict[str, str]:
    """Returns the sections of the page by their titles."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@dataclass(frozen=True)
class Program:
    """A program, configured as the page says.

    Attributes:
        title: the title of its section on the page.
        folder: the folder of its installation.
        once: arguments that are added to those of the page, so that it answers one text and ends. {} is the text.
        command: the command, if the page has none.
        driver: a program that gets the command as its arguments and starts it.
        environ: variables beside those of the page, so that it asks nothing of the network.
        needs: a text that each prompt contains, except prompts for a title or a summary.
        edits: calls, or answers, that change `two` to `turn` in file.txt. {} is the folder.
    """

    title: str
    folder: str
    once: tuple[str, ...]
    needs: str
    edits: tuple[Call | str, ...]
    command: tuple[str, ...] = ()
    driver: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    def _section(self, port: int) -> str:
        return sections()[self.title].replace(f":{PORT}", f":{port}")

    def write_files(self, home: Path, port: int = PORT) -> None:
        """Writes the files that the page shows, except those that exist."""
        section = self._section(port)
        for path, content in re.findall(r"^In `~/([^`]+)`:\n\n```\w+\n(.*?)```", section, flags=re.M | re.S):
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            if not (home / path).exists():
                (home / path).write_text(content)

    def run(self, home: Path, text: str, port: int = PORT) -> subprocess.Popen[str]:
        """Starts the program on a text, in the folder home/work.

        Args:
            port: the port of the server.
        """
        self.write_files(home, port)
        section = self._section(port)
        lines = "".join(re.findall(r"^```sh\n(.*?)```", section, flags=re.M | re.S)).splitlines()
        named = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
        command = self.command or tuple(lines[-1].split())
        bins = Path(os.environ[AGENTS]) / self.folder / ("node_modules/.bin" if self.folder == "npm" else "bin")
        arguments = [each.replace("{}", text) for each in (*self.driver, *command, *self.once)]
        return subprocess.Popen(
            [str(bins / arguments[0]), *arguments[1:]],
            cwd=home / "work",
            env={"HOME": str(home), "PATH": f"{bins}:{os.environ['PATH']}", "LANG": "C.UTF-8", **self.environ, **named},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def ended(child: subprocess.Popen[str]) -> str:
    """Waits for the end of a program, and returns its output. If it does not end, it is killed and the test fails."""
    try:
        text, _ = child.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        text, _ = child.communicate()
        raise AssertionError(f"{child.args} did not end: {text[-3000:]}") from None
    return text


PROGRAMS = {
    "codex": Program(
        "Codex CLI",
        "npm",
        ("--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox", "{}"),
        "<tools>",
        (
            ("exec_command", {"cmd": "cat file.txt"}),
            ("exec_command", {"cmd": "sed -i s/two/turn/ file.txt"}),
        ),
        command=("codex", "exec"),
    ),
    "claude": Program(
        "Claude Code",
        "npm",
        ("-p", "{}", "--output-format", "stream-json", "--verbose", "--permission-mode", "acceptEdits"),
        "<tools>",
        (
            ("Read", {"file_path": "{}/file.txt"}),
            ("Edit", {"file_path": "{}/file.txt", "old_string": "two", "new_string": "turn"}),
        ),
        environ={"DISABLE_AUTOUPDATER": "1"},
    ),
    "opencode": Program(
        "OpenCode",
        "npm",
        ("--format", "json", "{}"),
        "<tools>",
        (
            ("read", {"filePath": "{}/file.txt"}),
            ("edit", {"filePath": "{}/file.txt", "oldString": "two", "newString": "turn"}),
        ),
        command=("opencode", "run"),
        environ={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "qwen": Program(
        "Qwen Code",
        "npm",
        ("-p", "{}", "--yolo", "--output-format", "stream-json"),
        "<tools>",
        (
            ("read_file", {"file_path": "{}/file.txt"}),
            ("edit", {"file_path": "{}/file.txt", "old_string": "two", "new_string": "turn"}),
        ),
    ),
    "aider": Program(
        "aider",
        "aider",
        (
            *("--edit-format", "diff", "--yes-always", "--no-check-update", "--no-show-release-notes"),
            *("--no-show-model-warnings", "--no-auto-commits", "--map-tokens", "0", "--auto-test"),
            *("--test-cmd", "cat file.txt; grep -q turn file.txt", "--message", "{}", "file.txt"),
        ),
        "*SEARCH/REPLACE* block",
        (
            "file.txt\n```\n<<<<<<< SEARCH\ntwo\n=======\nthree\n>>>>>>> REPLACE\n```\n",
            "file.txt\n```\n<<<<<<< SEARCH\nthree\n=======\nturn\n>>>>>>> REPLACE\n```\n",
        ),
        environ={"AIDER_ANALYTICS": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "llm": Program(
        "llm",
        "llm",
        ("--functions", "../tools.py", "{}"),
        "<tools>",
        (
            ("read", {"path": "file.txt"}),
            ("write", {"path": "file.txt", "text": "one\nturn\n"}),
        ),
        command=("llm", "-m", "model"),
    ),
    OPEN_WEBUI: Program(
        "Open WebUI",
        OPEN_WEBUI,
        ("{}",),
        "<tools>",
        (
            ("read", {"path": "{}/file.txt"}),
            ("write", {"path": "{}/file.txt", "text": "one\nturn\n"}),
        ),
        driver=("python", str(Path(__file__).with_name("open_webui.py")), browser() or ""),
        environ={"WEBUI_AUTH": "False", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1"},
    ),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights whose header says that it was trained for 131,072 tokens."""
    from tests.model.architectures import write

    return write("llama", tmp_path_factory.mktemp("model") / "model.gguf", context_length=131_072)


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # one engine: models above 64 MB have one, and this one stands for them
    found = Server(tmp_path_factory.mktemp("server"), *_options(model), "-c", "65536", "--instances", "1")
    yield found
    found.close()


@pytest.fixture(scope="session")
def full_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose context is too small for the first request of any program."""
    found = Server(tmp_path_factory.mktemp("full"), *_options(model), "-c", "256", port=8081)
    yield found
    found.close()


def _options(model: Path) -> list[str]:
    template = Path(__file__).with_name("template.jinja")
    return ["-m", str(model), "--chat-template-file", str(template), "--no-page"]


@pytest.fixture(scope="session", params=list(PROGRAMS))
def program(request: pytest.FixtureRequest) -> Program:
    if request.param == OPEN_WEBUI and (why := without_open_webui()):
        pytest.skip(why)
    found: Program = PROGRAMS[request.param]
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file.txt").write_text("one\ntwo\n")
    (tmp_path / "tools.py").write_text(
        'def read(path: str) -> str:\n    "The text of a file."\n    return open(path).read()\n\n\n'
        'def write(path: str, text: str) -> str:\n    "Writes a file."\n    open(path, "w").write(text)\n'
        '    return "written"\n'
    )
    return tmp_path
