"""The last stage of `make test`: tests the package as a user installs it.

The wheel is built from the source package, as pip builds it. It is installed without the network into an environment of
its own, with wheels of the test environment's packages. This environment sees neither the checkout nor its llamabatch.
Then each command of README.md and docs/ runs on relative paths in a folder with an awkward name, with caches and a home
of its own. COMMANDS has a short form of each command. A sample of the model tests follows.
"""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from PIL import Image

from llamabatch.native_build import binding, source
from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
from tests.installed import offline
from tests.sounds import write_tone

CHECKOUT = Path(__file__).parents[2]
# docs/agents.md has commands of other programs; make test-agents runs them
PAGES = [CHECKOUT / "README.md", *sorted(set((CHECKOUT / "docs").glob("*.md")) - {CHECKOUT / "docs" / "agents.md"})]
SAMPLE = ("test_readme.py", "test_examples.py", "test_model_files.py", "test_saved_prefixes.py", "test_native.py")
EXTRAS = "tools,hub,images,sounds,parquet,zstd,metrics,columns,gpu,server"
OF_TESTS = ("pytest", "pytest-timeout", "hypothesis", "pydantic")  # for the sample of model tests
OURS = frozenset({"llamabatch", "llamabatch-llama", "llama-cpp-python"})
PROGRAMS = ("sh", "cat", "head", "uname", "env", "timeout", "seq", "sleep", "curl", "grep")
SECONDS = 120  # for one command, on a busy machine


@dataclasses.dataclass(frozen=True)
class Short:
    """A command in a short form, and its expected outcome.

    Attributes:
        line: the line for the shell.
        code: the exit code.
        says: a part of stdout and stderr.
        makes: files that must exist afterwards.
    """

    line: str
    code: int = 0
    says: str = ""
    makes: tuple[str, ...] = ()


COMPARE = "--strategies sequential,batched --no-baseline -n 2 --prompts prompts.txt"
REVIEWS = (
    '--prompt "Classify this review: {{ text }}" --keep all --id-column id --answer said --json-schema '
    """'{"type": "object", "properties": {"label": {"enum": ["good", "bad"]}}, "required": ["label"]}' --parse"""
)
# starts a server, and sends SIGTERM once it answers, as a service manager does; the server ends with 0
SERVED = (
    "timeout 120 llamabatch serve --port 0 {} > serve.log 2>&1 & server=$!; "
    "for i in $(seq 500); do grep -q 'served at' serve.log && break; sleep 0.2; done; "
    "kill $server; wait $server; code=$?; cat serve.log; exit $code"
)
# starts a server, and sends it a request once it is ready; the fields are options of the command, and of curl
ASKED = (
    "timeout 60 llamabatch serve {} --port 0 -n 8 > serve.log 2>&1 & server=$!; "
    "for i in $(seq 200); do url=$(grep -o 'http://127.0.0.1:[0-9]*' serve.log | head -1); "
    '[ "$url" ] && curl -sf $url/readyz > /dev/null && break; sleep 0.2; done; '
    "curl -s $url/v1/chat/completions {}; kill $server; wait $server"
)
_CHAT = (
    '-H "content-type: application/json" '
    """-d '{"messages": [{"role": "user", "content": "What is 7 plus 5?"}]}'"""
)
_CODER = (
    '-H "content-type: application/json" '
    """-d '{"model": "coder", "messages": [{"role": "user", "content": "Write hello world"}]}'"""
)
OFFLINE = "cannot be fetched: the hub is out of reach or turned off"

# Every llamabatch command of README.md and docs/. test_the_table_has_every_command fails if one is missing.
QUESTIONS = r"printf 'What is the capital of France?\nWhat is 7 plus 5?\n' > questions.txt"
COMMANDS = {
    'llamabatch generate -m model.gguf --chat "Why is the sky blue?"': Short(
        'llamabatch generate -m model.gguf --chat "Why is the sky blue?" -n 8'
    ),
    'llamabatch generate -m tiny --isolate --chat "What is the capital of France?"': Short(
        'llamabatch generate -m tiny --isolate --chat "What is the capital of France?"', says="Paris"
    ),
    'llamabatch generate -m hf:owner/repo:Q4_K_M "Once upon a time"': Short(
        'llamabatch generate -m hf:owner/repo:Q4_K_M "Once upon a time"', 2, OFFLINE
    ),
    "llamabatch generate --chat": Short('llamabatch generate -m tiny --chat "Hello" -n 2'),
    "llamabatch compare": Short("llamabatch compare --strategies sequential -n 2", says="64 prompts (bundled)"),
    "llamabatch compare -m model.gguf --prompts prompts.txt --plot compare.png": Short(
        f"llamabatch compare -m model.gguf --plot compare.png {COMPARE}", makes=("compare.png",)
    ),
    "llamabatch compare -m model.gguf --slots 1,2,4,8,16,32": Short(
        f"llamabatch compare -m ./model.gguf --slots 1,2 {COMPARE}", says="batched"
    ),
    "llamabatch compare -m model.gguf --prompts mine.jsonl -n 128": Short(
        "llamabatch compare -m model.gguf --prompts mine.jsonl -n 2 --strategies multi-instance --instances 2",
        says="mine.jsonl",
    ),
    "llamabatch compare --slots 1,2,4,8,16,32 --plot compare.png --json compare.json": Short(
        f"llamabatch compare --slots 1,2 --plot compare.png --json compare.json {COMPARE}",
        makes=("compare.png", "compare.json"),
    ),
    "llamabatch build": Short("llamabatch build --remove abc", 2, "No build has the key 'abc'; there are: none"),
    **{
        f"llamabatch build --backend {backend}": Short(f"llamabatch build --backend {backend} --list", 2, "--list")
        for backend in ("cuda", "vulkan", "metal")
    },
    "llamabatch build --list": Short("llamabatch build --list", says="No builds are kept"),
    "llamabatch tune -m model.gguf": Short(
        "llamabatch tune -m model.gguf --seconds 1 --beside-load", says="Engines on this machine"
    ),
    "llamabatch tune -m model.gguf --plot tune.png --json tune.json": Short(
        "llamabatch tune -m model.gguf --seconds 1 --beside-load --plot tune.png --json tune.json",
        makes=("tune.png", "tune.json"),
    ),
    "llamabatch tune -m model.gguf --p95-inter-token-ms 100": Short(
        "llamabatch tune -m model.gguf --seconds 1 --beside-load --p95-inter-token-ms 10000", says="10,000"
    ),
    'llamabatch tune -m "hf:owner/repo@revision:*Q8_0.gguf"': Short(
        'llamabatch tune -m "hf:owner/repo@revision:*Q8_0.gguf"', 2, OFFLINE
    ),
    "llamabatch synth llama-3.2-1b /tmp/1b.gguf": Short(
        "llamabatch synth qwen2.5-0.5b 1b.gguf --quant Q4_0 && llamabatch plan -m 1b.gguf", makes=("1b.gguf",)
    ),
    "llamabatch synth qwen2.5-0.5b": Short("llamabatch synth qwen2.5-0.5b", 2, "Missing argument 'OUT'"),
    "llamabatch serve --help": Short("llamabatch serve --help", says="--api-key"),
    "llamabatch completion bash": Short("llamabatch completion bash", says="complete -o nosort"),
    "llamabatch config --path": Short("llamabatch config --path", says="config.toml"),
    f"curl http://127.0.0.1:8080/v1/chat/completions {_CHAT}": Short(
        ASKED.format("-m model.gguf", _CHAT), says='"choices"'
    ),
    f"curl http://127.0.0.1:8080/v1/chat/completions {_CODER}": Short(
        ASKED.format("-m chat=model.gguf -m coder=model.gguf", _CODER), says='"model":"coder"'
    ),
    "llamabatch serve --models-dir ~/models": Short(
        "cat model.gguf > other.gguf; " + SERVED.format("--models-dir ."),
        says="2 models are served at http://127.0.0.1:",
    ),
    "llamabatch serve -m chat=qwen.gguf -m coder=coder.gguf --n-ctx 8192": Short(
        SERVED.format("-m chat=model.gguf -m coder=model.gguf --n-ctx 256"), says="slots of 256 tokens"
    ),
    "llamabatch serve --models-preset models.toml": Short(
        """echo '[coder]' > models.toml; echo 'model = "model.gguf"' >> models.toml; """
        + SERVED.format("--models-preset models.toml"),
        says="coder is served at http://127.0.0.1:",
    ),
    'llamabatch generate -m gemma.gguf --chat --image cat.png "What is in this picture?"': Short(
        "cat model.gguf > gemma.gguf; "
        "llamabatch generate -m gemma.gguf --chat --image cat.png 'What is in this picture?' -n 4"
    ),
    "llamabatch run photos.csv captions.jsonl -m gemma.gguf --image-column file "
    '--prompt "What is in this picture?" --keep file': Short(
        "cat model.gguf > gemma.gguf; echo file > photos.csv; echo cat.png >> photos.csv; "
        "llamabatch run photos.csv captions.jsonl -m gemma.gguf --image-column file "
        "--prompt 'What is in this picture?' --keep file -n 4; cat captions.jsonl",
        says='"file": "cat.png"',
    ),
    'llamabatch generate -m ultravox.gguf --chat --audio "first call.wav" "What is said here?"': Short(
        "cat model.gguf > ultravox.gguf; "
        "llamabatch generate -m ultravox.gguf --chat --audio 'first call.wav' 'What is said here?' -n 4"
    ),
    'llamabatch run calls.csv texts.jsonl -m ultravox.gguf --audio-column file --prompt "What is said here?" '
    "--keep file": Short(
        "cat model.gguf > ultravox.gguf; echo file > calls.csv; echo 'first call.wav' >> calls.csv; "
        "llamabatch run calls.csv texts.jsonl -m ultravox.gguf --audio-column file --prompt 'What is said here?' "
        "--keep file -n 4; cat texts.jsonl",
        says='"file": "first call.wav"',
    ),
    "curl http://127.0.0.1:8080/v1/audio/transcriptions -F file=@second.wav": Short(
        "cat model.gguf > ultravox.gguf; "
        + ASKED.replace("chat/completions", "audio/transcriptions").format(
            "ultravox.gguf --mmproj auto", "-F file=@second.wav -F max_tokens=4"
        ),
        says='"audio_tokens":150',
    ),
    "llamabatch serve ultravox.gguf --mmproj auto": Short(
        "cat model.gguf > ultravox.gguf; " + SERVED.format("ultravox.gguf --mmproj auto"), says="projector"
    ),
    "llamabatch serve gemma.gguf --mmproj auto": Short(
        "cat model.gguf > gemma.gguf; " + SERVED.format("gemma.gguf --mmproj auto"), says="projector"
    ),
    "llamabatch serve gemma.gguf --mmproj auto --allowed-local-media-path ~/pictures --allowed-media-domains "
    "upload.wikimedia.org": Short(
        "cat model.gguf > gemma.gguf; "
        + SERVED.format("gemma.gguf --mmproj auto --allowed-local-media-path . --allowed-media-domains a.org"),
        says="projector",
    ),
    "llamabatch serve -m model.gguf": Short(SERVED.format("-m model.gguf -n 8"), says="is served at http://127.0.0.1:"),
    "llamabatch serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt": Short(
        "echo secret > keys.txt; " + SERVED.format("-m model.gguf --host 0.0.0.0 --api-key-file keys.txt"),
        says="with a key",
    ),
    "llamabatch serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt --ssl-keyfile key.pem "
    "--ssl-certfile cert.pem": Short(
        "llamabatch serve -m model.gguf --host 0.0.0.0 --ssl-keyfile key.pem --ssl-certfile cert.pem", 2, "--api-key"
    ),
    "llamabatch doctor": Short("llamabatch doctor", says="0 errors"),
    "llamabatch doctor --verbose": Short("llamabatch doctor --verbose", says="0 errors"),
    "llamabatch generate --help-all": Short("llamabatch generate --help-all", says="--rope-freq-base"),
    "llamabatch plan -m tiny --n-ctx 1024 --memory 8G": Short("llamabatch plan -m tiny --n-ctx 1024 --memory 8G"),
    "llamabatch plan -m model.gguf": Short("llamabatch plan -m model.gguf"),
    "llamabatch plan -m model.gguf --n-ctx 8192 --slots 16": Short(
        "llamabatch plan -m model.gguf --n-ctx 512 --slots 16"
    ),
    "llamabatch plan -m model.gguf --prompts prompts.jsonl -n 200": Short(
        "llamabatch plan -m model.gguf --prompts prompts.jsonl -n 200", says="prompts.jsonl"
    ),
    "llamabatch plan -m model.gguf --memory 8G --json": Short(
        "llamabatch plan -m model.gguf --memory 8G --json", says='"model"'
    ),
    "llamabatch plan -m model.gguf --memory 8G --kubernetes": Short(
        "llamabatch plan -m model.gguf --memory 8G --kubernetes", says="LLAMABATCH_N_SLOTS"
    ),
    "llamabatch plan -m model.gguf --plot plan.png": Short(
        "llamabatch plan -m model.gguf --plot plan.png", makes=("plan.png",)
    ),
    QUESTIONS: Short(QUESTIONS, makes=("questions.txt",)),
    "llamabatch run -m tiny --chat questions.txt answers.jsonl": Short(
        "llamabatch run -m tiny --chat questions.txt answers.jsonl && cat answers.jsonl && "
        "llamabatch run -m tiny --chat questions.txt answers.jsonl",
        says="answers.jsonl is complete",
        makes=("answers.jsonl",),
    ),
    "llamabatch run prompts.jsonl results.jsonl -m model.gguf": Short(
        "llamabatch run prompts.jsonl results.jsonl -m model.gguf --plot run.png -n 8",
        makes=("results.jsonl", "run.png"),
    ),
    f"llamabatch run reviews.csv labels.jsonl -m model.gguf --chat -t 0 {REVIEWS}": Short(
        "printf 'id,text,stars\\n1,\"Fine, really\",4\\n' > reviews.csv && "
        f"llamabatch run reviews.csv labels.csv -m model.gguf --chat -t 0 -n 20 {REVIEWS} && cat labels.csv",
        says="row,id,text,stars,said,finish_reason,label,error",
        makes=("labels.csv",),
    ),
    "llamabatch run prompts.jsonl results.jsonl -m model.gguf --ray auto --shards 8": Short(
        "llamabatch run prompts.jsonl results.jsonl -m model.gguf --ray auto --shards 8", 3, "llamabatch[ray]"
    ),
    "llamabatch run in.jsonl - | head": Short("llamabatch run -m model.gguf in.jsonl - -n 4 | head", says='"text"'),
    "llamabatch run --metrics-file FILE": Short(
        "llamabatch run --metrics-file m.prom -m model.gguf -n 4 'in.*' out.jsonl", makes=("m.prom", "out.jsonl")
    ),
    "llamabatch chat -m model.gguf": Short("llamabatch chat -m model.gguf", 2, "the message is empty"),
    'echo "Why is the sky blue?" | llamabatch chat -m model.gguf': Short(
        'echo "Why is the sky blue?" | llamabatch chat -m model.gguf -n 8'
    ),
    "llamabatch pull owner/repo:Q4_K_M": Short("llamabatch pull owner/repo:Q4_K_M", 2, OFFLINE),
    "llamabatch models": Short("llamabatch models", says="no model is kept"),
    "llamabatch rm owner/repo:Q4_K_M": Short("llamabatch rm --yes owner/repo:Q4_K_M", 2, "there is no model"),
    "llamabatch completion bash > ~/.local/share/bash-completion/completions/llamabatch": Short(
        "llamabatch completion bash > completion && echo read", says="read", makes=("completion",)
    ),
    'llamabatch completion zsh > "${fpath[1]}/_llamabatch"': Short("llamabatch completion zsh", says="compdef"),
    "llamabatch completion fish > ~/.config/fish/completions/llamabatch.fish": Short(
        "llamabatch completion fish", says="complete"
    ),
    "llamabatch eval -m model.gguf --tasks arc_easy,gsm8k --num-fewshot 5 --output results": Short(
        "llamabatch eval -m model.gguf --tasks arc_easy", 3, "run: pip install 'llamabatch[lm-eval]'"
    ),
    "llamabatch top": Short("llamabatch top", 1, "no job is running"),
    "llamabatch top PID": Short("llamabatch top 4194304", 1, "no running job"),
}
FILES = {
    "prompts.txt": "Once upon a time\nThe capital of France\n",
    "mine.jsonl": '{"prompt": "Once"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n',
    "questions.txt": "What is the capital of France?\n",
    "prompts.jsonl": '{"prompt": "Once upon a time"}\n',
    "in.jsonl": '{"prompt": "Once", "max_tokens": 4}\n',
}
OF_THE_CHECKOUT = ("make", "git", "pip", "python", "kill", "cat")  # commands that the checkout needs
_STARTERS = ("llamabatch", "echo", "printf", *OF_THE_CHECKOUT)


def commands():
    """Returns the commands of all pages: lines of shell blocks, and whole commands in sentences."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.S | re.M):
            first = body.split(maxsplit=1)[0]
            if language in ("sh", "bash", "shell", "console") or (not language and first in _STARTERS):
                for line in body.replace("\\\n", " ").splitlines():
                    found[_plain(line)] = page.name
        prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose):
            words = span.replace("\\|", "|").split()
            if words[0] in ("make", "pip") or (words[0] == "llamabatch" and len(words) > 2):
                found[_plain(" ".join(words))] = page.name
    return {command: page for command, page in found.items() if command}


def _plain(line):
    """Removes the comment, the shell's prompt and needless blanks from a command."""
    line = re.sub(r"\s#\s.*$", "", line.strip())
    return re.sub(r"\s+", " ", line.removeprefix("$ ")).strip()


def test_the_table_has_every_command():
    ours = {command: page for command, page in commands().items() if command.split()[0] not in OF_THE_CHECKOUT}
    unknown = [f"{page}: {command}" for command, page in ours.items() if command not in COMMANDS]
    assert not unknown, "commands that the table of this file does not know: say there how each is shortened"
    assert not set(COMMANDS) - set(ours), "commands that no page names any more"


def test_what_make_and_pip_are_told_is_there(stranger):
    told = [command for command in commands() if command.split()[0] in ("make", "pip")]
    targets = re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    extras = stranger.metadata().get_all("Provides-Extra")
    assert len(told) > 10
    for command in told:
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
        else:
            assert words[1] == "install", command
            name, _, named = words[2].rstrip("]").partition("[")
            assert name in ("llamabatch", ".", "openai"), command
            assert set(filter(None, named.split(","))) <= set(extras), command


class Stranger:
    """A user who has installed the wheel, and has no checkout."""

    def __init__(self, home: Path, environment: Path, source: Path) -> None:
        self.home, self.environment, self.source = home, environment, source
        self.python = environment / "bin" / "python"

    def run(self, *command, folder, timeout=SECONDS):
        """Runs a command in a folder, with a home and a cache beside this folder."""
        given = variables(self.home, self.environment)
        given |= {"HOME": str(folder.parent / "home"), "LLAMABATCH_CACHE": str(folder.parent / "cache")}
        return subprocess.run(
            command, cwd=folder, env=given, timeout=timeout,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def metadata(self):
        [found] = self.environment.glob("lib/python*/site-packages/llamabatch-*.dist-info")
        return PathDistribution(found).metadata


def variables(home, environment):
    """Returns environment variables whose PATH has a shell and few other programs: no compiler, no git."""
    programs = home / "programs"
    if not programs.is_dir():
        programs.mkdir()
        for name in PROGRAMS:
            (programs / name).symlink_to(shutil.which(name))
    path = os.pathsep.join((str(environment / "bin"), str(programs)))
    assert not any(shutil.which(name, path=path) for name in ("cc", "c++", "gcc", "g++", "clang", "cmake", "make"))
    keep = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES", "TERM")
    return {name: os.environ[name] for name in keep if name in os.environ} | {"PATH": path, "HF_HUB_OFFLINE": "1"}


def done(*command, **more):
    """Runs a command that must succeed, and returns its output."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, **more)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """Makes both wheels from the source package, and installs them into an environment of their own, without an index,
    a compiler or the checkout."""
    home = tmp_path_factory.mktemp("stranger")
    build = "import os, sys; from hatchling.build import build_sdist; os.chdir(sys.argv[1]); build_sdist(sys.argv[2])"
    done(sys.executable, "-c", build, str(CHECKOUT), str(home))
    [packed] = home.glob("llamabatch-*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(home, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    source_folder = home / packed.name.removesuffix(".tar.gz")
    wheels = home / "wheels"
    # only the CPU variant of `make setup`, because other variants take minutes to build
    make = ("-m", "native_patches.wheels", "--variants", "native", "--out", str(wheels))
    done(sys.executable, *make, cwd=home, env={**os.environ, "PYTHONPATH": str(source_folder)})
    for known in offline.needed_by([f"llamabatch[{EXTRAS}]", *OF_TESTS, *binding.NEEDED_PACKAGES], OURS):
        offline.repack(known, wheels)
    environment = home / "environment"
    done(sys.executable, "-m", "venv", str(environment))
    pip = ("-m", "pip", "--disable-pip-version-check", "--no-input")
    install = ("install", "--no-index", "--no-compile", "--find-links", str(wheels), f"llamabatch[{EXTRAS}]", *OF_TESTS)
    done(str(environment / "bin" / "python"), *pip, *install, env=variables(home, environment))
    shutil.rmtree(wheels)  # the wheels are large, and pytest keeps the folders of several runs
    return Stranger(home, environment, source_folder)


@pytest.fixture
def folder(tmp_path, stranger):
    """The working folder. It contains a model that no cache knows, and the inputs of the commands."""
    (tmp_path / "home").mkdir()
    folder = tmp_path / "my prömpts"
    folder.mkdir()
    model = (CHECKOUT / "llamabatch" / "bundled" / "tiny.gguf").read_bytes()
    at = model.index(b"general.name") + len(b"general.name") + 4 + 8
    (folder / "model.gguf").write_bytes(model[:at] + model[at : at + 1].swapcase() + model[at + 1 :])
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    Image.new("RGB", (80, 60), "orange").save(folder / "cat.png")
    write_projector(folder / "mmproj-gemma.gguf", ProjectorShape("gemma3"), n_embd=192)
    write_projector(folder / "mmproj-ultravox.gguf", ProjectorShape("ultravox", n_merge=10), n_embd=192)
    for name in ("first call.wav", "second.wav"):
        write_tone(folder / name)
    return folder


def test_neither_the_checkout_nor_its_installation_is_seen(stranger, tmp_path):
    code = (
        "import importlib.util as u, sys, pathlib, llamabatch, llamabatch_llama\n"
        "print(llamabatch.__file__)\n"
        "print([e for e in sys.path if (pathlib.Path(e) / 'llamabatch' / '__init__.py').exists()])\n"
        "print([name for name in ('tests', 'benchmarks', 'llama_cpp') if u.find_spec(name)])\n"
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    told = stranger.run(str(stranger.python), "-c", code, folder=folder)
    assert told.returncode == 0, told.stderr
    file, places, ours = told.stdout.splitlines()
    assert Path(file).is_relative_to(stranger.environment)
    assert places == str([str(Path(file).parents[1])])
    assert ours == "[]"


def test_the_wheel_holds_what_the_package_needs(stranger):
    [package] = stranger.environment.glob("lib/python*/site-packages/llamabatch")
    here = CHECKOUT / "llamabatch"
    wanted = {str(f.relative_to(here)) for f in here.rglob("*") if f.suffix in (".py", ".typed", ".jsonl", ".gguf")}
    found = {str(f.relative_to(package)) for f in package.rglob("*")}
    assert wanted <= found
    folder = package / "native_build" / "native_patches"
    native = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert native == {str(path.relative_to(source.PATCH_FOLDER)) for path in source.build_files()}
    assert {"sampler/sampler.cpp", "own_names.cmake", *(f"kernels/{name}" for name in source.KERNELS)} <= native
    assert not list(package.glob("sampling/libllamabatch.*"))  # the other wheel has it
    libraries = {f.name for f in (package.parent / "llamabatch_llama" / "lib").iterdir()}
    assert {"libllama.so", "libllamabatch.so"} <= libraries
    notices = {f.name for f in (package.parent / "llamabatch_llama" / "licenses").iterdir()}
    assert notices == {"llama.cpp.txt", "llama-cpp-python.txt", "llamabatch.txt", "UPSTREAM.txt"}


def test_the_first_example_of_the_readme(stranger, folder):
    [first, *_] = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), flags=re.S)
    for code in (first, first.replace('"tiny"', '"model.gguf"')):
        told = stranger.run(str(stranger.python), "-c", code, folder=folder)
        assert told.returncode == 0, told.stderr
        assert "Paris" in told.stdout
        assert told.stderr == ""


@pytest.mark.parametrize("short", list(COMMANDS.values()), ids=lambda short: re.sub(r"\W+", "-", short.line)[:60])
def test_a_command(stranger, folder, short):
    before = sorted(path.name for path in folder.iterdir())
    told = stranger.run("sh", "-c", short.line, folder=folder)
    assert told.returncode == short.code, told.stdout + told.stderr
    assert short.says in told.stdout + told.stderr
    assert "Traceback" not in told.stderr
    for name in short.makes:
        assert (folder / name).stat().st_size > 0
        if name.endswith(".gguf"):
            (folder / name).unlink()  # pytest keeps the folders of several runs
    assert sorted(path.name for path in folder.iterdir() if path.name in before) == before


def test_a_sample_of_the_model_tests(stranger, tmp_path):
    """Copies the tests out of the source package, so that they import the installed llamabatch and not that beside
    them."""
    room, empty = tmp_path / "room", tmp_path / "empty"
    shutil.copytree(stranger.source, room, ignore=shutil.ignore_patterns("llamabatch", "PKG-INFO"))
    empty.mkdir()
    (tmp_path / "home").mkdir()
    code = (
        "import os, sys, pytest; os.chdir(sys.argv[1]); sys.path.insert(0, sys.argv[1])\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow', *sys.argv[2:]]))"
    )
    files = [str(room / "tests" / "model" / name) for name in SAMPLE]
    told = stranger.run(str(stranger.python), "-c", code, str(room), *files, folder=empty, timeout=600)
    assert told.returncode == 0, told.stdout + told.stderr
