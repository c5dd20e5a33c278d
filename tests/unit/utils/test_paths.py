"""A caller's path is resolved once. Later, os.chdir, other processes and `~` do not change which file it means."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import llamabatch
from llamabatch import AdapterError, ConfigError, EngineConfig, InputError, ModelFileError
from llamabatch.cli.options import File
from llamabatch.gguf import resolve
from llamabatch.gguf.header import read_header
from llamabatch.jobs.input import sources
from llamabatch.jobs.settings import Settings as Job
from llamabatch.llama import vetting
from llamabatch.monitor.prometheus import MetricsFile
from llamabatch.request.adapters import adapter_path
from llamabatch.tools.compare.run import Settings as Comparison
from llamabatch.tools.plan.run import Question
from llamabatch.tools.tune.run import Settings as Tuning
from llamabatch.tools.workload import load
from llamabatch.utils import paths
from llamabatch.utils.subprogram import run_program


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with special characters in its name. The home folder is beside it."""
    folder = tmp_path / "a b [é]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_a_relative_path_is_of_the_working_directory(here):
    assert paths.absolute("m.gguf") == paths.absolute("./m.gguf") == paths.absolute(Path("m.gguf")) == f"{here}/m.gguf"
    assert paths.absolute("/m.gguf") == "/m.gguf"
    assert paths.absolute("sub//m.gguf") == f"{here}/sub/m.gguf"


def test_a_home_is_expanded_where_no_shell_has_done_it(here, tmp_path):
    assert paths.absolute("~/m.gguf") == f"{tmp_path}/home/m.gguf"
    assert paths.absolute("~no such user/m.gguf") == f"{here}/~no such user/m.gguf"
    assert paths.absolute("a~/m.gguf") == f"{here}/a~/m.gguf"


def test_two_dots_behind_a_link_lead_where_the_system_goes(here, elsewhere):
    (elsewhere / "in").mkdir()
    (elsewhere / "m.gguf").touch()
    Path("link").symlink_to(elsewhere / "in")
    Path("other.gguf").symlink_to(elsewhere / "m.gguf")
    assert paths.absolute("link/../m.gguf") == str(elsewhere / "m.gguf")
    assert paths.absolute("../" + here.name + "/other.gguf") == f"{here}/other.gguf"  # the last link is not resolved
    assert paths.absolute("link/..") == str(elsewhere)


@pytest.mark.parametrize("path", ["a\0b", "~\0/b", "~\ud800/b", "\ud800"])
def test_what_no_system_has_is_refused_at_once(here, path):
    for use in (paths.absolute, resolve.resolve, EngineConfig):
        with pytest.raises(ConfigError, match=r"\\(x00|ud800).* is no path: ") as refused:
            use(path)
        assert str(refused.value).isprintable()


def test_a_working_directory_that_is_gone(here):
    here.rmdir()
    assert paths.absolute("/m.gguf") == "/m.gguf"
    assert paths.shown("/m.gguf") == "/m.gguf"
    with pytest.raises(ConfigError, match=r"'m.gguf' is a relative path, and the working directory is gone"):
        EngineConfig("m.gguf")


def test_messages_show_a_path_as_a_caller_here_writes_it(here, elsewhere):
    assert paths.shown(f"{here}/in/x.jsonl") == "in/x.jsonl"
    assert paths.shown(f"{here}") == f"{here}"
    assert paths.shown(f"{here}x/y") == f"{here}x/y"
    assert paths.shown(elsewhere / "y") == str(elsewhere / "y")


@pytest.mark.parametrize("name", ["tiny", "hf:owner/repo:Q4_K_M", "hf:owner/repo@revision:*Q8_0.gguf"])
def test_names_that_are_no_paths_stay(here, name):
    assert EngineConfig(name).model == name
    assert EngineConfig(name, speculate="draft", draft_model=name).draft_model == name
    assert Job("in.jsonl", "out.jsonl", name).model == Tuning(name).model == Question(name).model == name


def test_an_engine_config_resolves_its_files(here):
    given = {"speculate": "draft", "draft_model": Path("d.gguf"), "adapters": {"a": "a.gguf", "b": Path("~/b.gguf")}}
    config = EngineConfig.from_options("m.gguf", given)
    assert config.model == f"{here}/m.gguf"
    assert config.draft_model == f"{here}/d.gguf"
    assert config.adapters == (("a", f"{here}/a.gguf"), ("b", f"{os.environ['HOME']}/b.gguf"))
    assert EngineConfig("m.gguf").model == EngineConfig("./m.gguf").model == config.model


def test_settings_keep_what_they_meant(here, elsewhere, monkeypatch):
    files = {"speculate": "draft", "draft_model": "d.gguf", "adapters": {"a": "a.gguf"}}
    job = Job(("in.jsonl", "*.csv", "-"), "out.jsonl", "m.gguf", metrics_file="m.prom", engine=files)
    comparison = Comparison("m.gguf", prompts=Path("p.txt"), engine=files)
    question = Question("m.gguf", files, prompts=Path("p.txt"))
    tuning = Tuning("m.gguf")
    monkeypatch.chdir(elsewhere)
    for made in (job, comparison, question, tuning):
        assert made.model == f"{here}/m.gguf"
    for config in (job.config, comparison.config("batched"), question.config()):
        assert config.model == f"{here}/m.gguf"
        assert config.draft_model == f"{here}/d.gguf"
        assert config.adapters == (("a", f"{here}/a.gguf"),)
    assert tuning.config().model == f"{here}/m.gguf"
    assert comparison.prompts == question.prompts == here / "p.txt"
    assert (job.inputs[0], job.output, job.metrics_file) == tuple(
        f"{here}/{x}" for x in ("in.jsonl", "out.jsonl", "m.prom")
    )
    assert job.inputs[2] == "-"
    assert Job("-", "-").output == "-"


def test_a_glob_finds_the_files_of_its_folder_from_anywhere(here, elsewhere, monkeypatch):
    for name in ("b.jsonl", "a.jsonl", "c[1].jsonl"):
        Path(name).write_text("{}\n")
    job = Job(("*.jsonl",), "out.csv")
    assert [source.name for source in sources.find(job.inputs)] == ["a.jsonl", "b.jsonl", "c[1].jsonl"]
    named = Job(("c[1].jsonl",), "out.csv")
    monkeypatch.chdir(elsewhere)
    assert [source.path for source in sources.find(job.inputs)] == [
        here / n for n in ("a.jsonl", "b.jsonl", "c[1].jsonl")
    ]
    assert [source.path for source in sources.find(named.inputs)] == [here / "c[1].jsonl"]


def test_messages_of_inputs_name_them_as_they_were_given(here):
    with pytest.raises(InputError, match=r"^the input no.jsonl does not exist$"):
        sources.find(Job("no.jsonl", "out").inputs)
    with pytest.raises(InputError, match=r"^p.txt cannot be read: No such file"):
        load(Comparison(prompts=Path("p.txt")).prompts, None, 32)


def test_options_of_the_commands_are_resolved(here):
    convert = File().convert
    assert convert("x.json", None, None) == here / "x.json"
    assert convert("~/x.json", None, None) == Path(os.environ["HOME"]) / "x.json"
    assert convert("-", None, None) == Path("-")


def test_a_metrics_file_stays_where_it_was_meant(here, elsewhere, monkeypatch):
    pytest.importorskip("prometheus_client")
    file = MetricsFile("m.prom")
    monkeypatch.chdir(elsewhere)
    assert file.path == here / "m.prom"


@pytest.mark.parametrize("path", [None, "", 7, b"a.gguf", ["a.gguf"]])
def test_an_adapter_that_is_no_path_is_refused(here, path):
    with pytest.raises(AdapterError, match=r"the path of adapter 'a' is .*; give a str or a Path"):
        adapter_path("a", path)
    assert adapter_path("a", Path("a.gguf")) == f"{here}/a.gguf"


def test_the_cache_stays_where_it_was_first_asked_for(here, elsewhere, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", "a cache of this test")
    assert paths.cache_dir() == here / "a cache of this test"
    monkeypatch.chdir(elsewhere)
    assert paths.cache_dir() == here / "a cache of this test"


def test_a_model_in_parts_behind_links_is_known_by_all_of_them(tmp_path):
    """The hub's cache is like this: the files themselves have other names."""
    names = [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for n, name in enumerate(names):
        (tmp_path / f"blob{n}").write_bytes(bytes(n + 1))
        (tmp_path / name).symlink_to(f"blob{n}")
    known = vetting.FileIdentity.of(tmp_path / names[0])
    assert [path for path, *_ in known.identity] == [str(tmp_path.resolve() / f"blob{n}") for n in range(3)]
    assert known.n_bytes == 1 + 2 + 3


def test_a_program_of_ours_starts_in_any_folder(here):
    Path("json.py").write_text("raise SystemExit('a module that happens to lie in the working directory')\n")
    Path("llamabatch").mkdir()
    done = run_program("llamabatch", "--version", timeout_s=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(b"version %s\n" % llamabatch.__version__.encode())


def test_a_program_finds_the_package_although_it_was_imported_from_another_folder(here, elsewhere):
    """sys.path contains "", as with `python -c`, and the program has changed its folder since."""
    (here / "llamabatch").symlink_to(Path(paths.__file__).parents[1])
    code = (
        "import os, subprocess, sys; from llamabatch.utils.subprogram import command\n"
        f"os.chdir({str(elsewhere)!r})\n"
        "sys.exit(subprocess.run(command('llamabatch.utils.subprogram')).returncode)"
    )
    rest = [entry for entry in sys.path if not (Path(entry) / "llamabatch").exists()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(rest), "PYTHONNOUSERSITE": "1"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_user_without_a_home_keeps_nothing():
    def find(name, appauthor):
        raise RuntimeError("Could not determine home directory.")

    assert paths.of_user(find) == Path(os.sep, "nonexistent", "llamabatch")


def test_a_name_of_several_lines_is_one_line_in_messages(tmp_path, monkeypatch):
    odd = tmp_path / "a\nforged\tline\x1b[2J.gguf"
    monkeypatch.chdir(tmp_path)
    assert paths.shown(odd) == r"a\nforged\tline\x1b[2J.gguf"
    assert paths.one_line(odd) == f"{tmp_path}/{paths.shown(odd)}"
    odd.write_bytes(b"nothing")
    for call in (lambda: resolve.resolve(str(odd)), lambda: resolve.resolve(str(odd) + "x"), lambda: read_header(odd)):
        with pytest.raises(ModelFileError) as refusal:
            call()
        assert "\n" not in str(refusal.value)
