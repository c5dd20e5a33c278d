"""`llamabatch serve` with several models: which models it finds, and their options. The server is not started."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from llamabatch.cli import cli
from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
from llamabatch.utils.paths import bundled_model

run = pytest.importorskip("llamabatch.server.run")


@pytest.fixture
def several(monkeypatch, tmp_path):
    """Runs the command up to the start of the server. Returns the result, models by name, and the pool's options."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLAMABATCH_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("LLAMABATCH_MODEL", raising=False)
    monkeypatch.setattr("llamabatch.server.http.logs.configure", lambda options: None)
    monkeypatch.chdir(tmp_path)

    def call(*arguments, during=()):
        found, during = {}, list(during)

        def served(specs, options, pool, started, look_again):
            found.update({each.options.served_model_names: each for each in specs}, pool=pool, options=options)
            started(["http://127.0.0.1:8080"])
            while during:
                during.pop()(look_again)

        monkeypatch.setattr(run, "serve_several", served)
        result = CliRunner().invoke(cli, ["serve", *map(str, arguments)])
        pool = found.pop("pool", None)
        found.pop("options", None)
        return result, {names[0] if names else "": spec for names, spec in found.items()}, pool

    return call


@pytest.fixture
def folder(tmp_path):
    """A folder with a blank in its name, and models in it."""
    made = tmp_path / "my models"
    (made / "in parts").mkdir(parents=True)
    for name in ("b.gguf", "a c.gguf", "in parts/x-00001-of-00002.gguf", "mmproj-a.gguf"):
        shutil.copy(bundled_model(), made / name)
    (made / "in parts" / "x-00002-of-00002.gguf").write_bytes(b"GGUF")
    (made / "readme.txt").write_text("no model")
    return made


def test_the_models_of_a_folder(several, folder):
    result, specs, pool = several("--models-dir", "my models", "--n-ctx", "512")
    assert result.exit_code == 0, result.output
    assert list(specs) == ["a c", "b"]
    assert "'in parts' is left out" in result.stderr  # the file named 1 of 2 is a whole model
    assert specs["b"].config.model == str(folder / "b.gguf")
    assert {spec.config.n_ctx for spec in specs.values()} == {512}
    assert all(isinstance(spec.config.n_slots, int) for spec in specs.values())
    assert pool.max_loaded == 0
    assert "2 models are served at http://127.0.0.1:8080" in result.stderr
    assert "all at once, without a key" in result.stderr


def test_a_folder_with_an_mmproj_file_holds_a_model_that_reads_pictures(several, folder, tmp_path, monkeypatch):
    for name in ("sees", "blind"):
        (folder / name).mkdir()
        shutil.copy(bundled_model(), folder / name / "model.gguf")
        write_projector(folder / name / "a-mmproj.gguf", ProjectorShape("mlp"), 192, seed=1)
    (folder / "empty.gguf").mkdir()
    closed = folder / "closed"
    closed.mkdir()
    listed = Path.iterdir

    def iterdir(path):
        if path == Path("my models") / "closed":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    (tmp_path / "p.toml").write_text("[blind]\nno-mmproj = true\n[sees]\nn-ctx = 512\n")
    result, specs, _ = several("--models-dir", "my models", "--models-preset", "p.toml")
    assert result.exit_code == 0, result.output
    assert {name: spec.config.mmproj for name, spec in specs.items()} == {
        **{"a c": None, "b": None, "blind": None, "sees": "auto"}
    }
    assert "'closed' is left out: Permission denied" in result.stderr


def test_a_second_look_on_another_thread_finds_what_has_come(several, folder):
    def look(look_again):
        shutil.copy(folder / "b.gguf", folder / "new.gguf")
        (folder / "bad.gguf").write_bytes(b"none")
        (folder / "a c.gguf").unlink()
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(look_again, ["a c", "b"]).result()
        again = look_again(["a c", "b", "new"])
        assert not again.new
        assert found.names == {"b", "new", "bad", "in parts"}
        assert [(each.config.model, each.config.n_ctx) for each in found.new] == [(str(folder / "new.gguf"), 512)]

    result, _, _ = several("--models-dir", "my models", "--n-ctx", "512", during=[look])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("'bad' is left out") == 1

    def none(look_again):
        assert look_again is None  # models of the command line are not looked for again

    result, _, _ = several("-m", f"chat={folder}/b.gguf", during=[none])
    assert result.exit_code == 0, result.output


def test_named_models_and_those_named_by_their_files(several, folder):
    result, specs, pool = several("-m", f"chat={folder}/b.gguf", "-m", f"{folder}/a c.gguf", "--models-max", "1")
    assert result.exit_code == 0, result.output
    assert list(specs) == ["chat", "a c"]
    assert pool.max_loaded == 1
    assert "that are free, taking turns, without a key" in result.stderr


@pytest.mark.parametrize("kind", ["toml", "ini"])
def test_a_file_of_presets(several, folder, tmp_path, kind):
    model = f'"{folder}/b.gguf"' if kind == "toml" else f"{folder}/b.gguf"
    name = '"a c"' if kind == "toml" else "a c"
    text = '"quoted"' if kind == "toml" else "quoted"
    everything = '["*"]' if kind == "toml" else "[*]"
    (tmp_path / f"models.{kind}").write_text(
        f"version = 1\n{everything}\nc = 2048\nn-slots = 2\ntemp = 0.5\njinja = true\n"
        f"[chat]\nmodel = {model}\nalias = {text}\ntemperature = 0.25\nload_on_startup = true\n"
        f"[{name}]\nnp = 4\nLLAMA_ARG_CACHE_TYPE_K = {text.replace('quoted', 'q8_0')}\nflash_attn = true\n"
        "kv-unified = false\n",
        encoding="utf-8",
    )  # fmt: skip
    result, specs, pool = several(
        "--models-preset", f"models.{kind}", "--models-dir", folder, "--sleep-idle-seconds", "9"
    )
    assert result.exit_code == 0, result.output
    assert sorted(specs) == ["a c", "b", "chat"]
    chat, other = specs["chat"], specs["a c"]
    assert (chat.options.served_model_names, chat.on_startup) == (("chat", "quoted"), True)
    assert (chat.config.n_ctx, chat.config.n_slots, chat.options.sampling["temperature"]) == (1024, 2, 0.25)
    assert (other.config.n_slots, other.config.type_k, other.config.flash_attn) == (4, "q8_0", "on")
    assert (other.config.kv, other.config.n_ctx, other.on_startup) == ("split", 512, False)
    assert pool.sleep_idle_s == 9


def test_the_command_line_goes_before_a_section(several, folder, tmp_path):
    (tmp_path / "models.toml").write_text(f'[chat]\nmodel = "{folder}/b.gguf"\nn-slots = 4\nn-ctx = 256\n')
    result, specs, _ = several("--models-preset", "models.toml", "--n-slots", "3")
    assert result.exit_code == 0, result.output
    assert (specs["chat"].config.n_slots, specs["chat"].config.n_ctx) == (3, 256)


def test_one_model_that_sleeps_keeps_its_names(several, folder):
    result, specs, pool = several("-m", f"{folder}/b.gguf", "--sleep-idle-seconds", "5")
    assert result.exit_code == 0, result.output
    [spec] = specs.values()
    assert (spec.options.served_model_names, spec.on_startup, pool.sleep_idle_s) == ((), True, 5)


def test_names_and_folders_from_variables_may_have_blanks(several, folder, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_MODELS_DIR", str(folder))
    assert list(several()[1]) == ["a c", "b"]
    monkeypatch.setenv("LLAMABATCH_MODEL", f"chat={folder}/a c.gguf")
    assert list(several()[1]) == ["chat", "a c", "b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[x]\nn-slots = 2\n", "the section 'x' names no model; give it a line model = PATH"),
        ('[x]\nmodel = "tiny"\nn-slotz = 2\n', "the section 'x' has no option 'n-slotz'; did you mean 'n-slots'?"),
        ('[x]\nmodel = "tiny"\njinja = "perhaps"\n', "jinja is 'perhaps'; give true or false"),
        ('[x]\nmodel = "tiny"\n[x.sampling]\ntop_k = 1\n', "sampling of 'x' is a table; give a value"),
        ('model = "tiny"\n', "'model' outside a section; give each model one, as [name]"),
        ('[x]\nmodel = "tiny"\nlog-prompts-dir = "a"\n', "never writes prompts down"),
        ('[x]\nmodel = "tiny"\napi-key = "k"\n', "--api-key in the section 'x' is an option of the whole server"),
        ('[x]\nmodel = "tiny"\nmodels-max = 2\n', "--models-max in the section 'x' is an option of the whole server"),
        ('["*"]\nport = 9\n[x]\nmodel = "tiny"\n', "--port in the section 'x' is an option of the whole server"),
        ('[x]\nmodel = "tiny"\nn-ctx = "many"\n', "the section 'x': Invalid value for '--n-ctx'"),
        ('[x]\nmodel = "tiny"\nload-on-startup = "perhaps"\n', "load-on-startup is 'perhaps'; give true or false"),
        ('[x]\nmodel = ["tiny", "tiny"]\n', "model of 'x' is a list; give one path"),
        ('[x]\nmodel = "tiny"\nLLAMA_ARG_NOPE = 3\n', "the section 'x' has no option 'LLAMA_ARG_NOPE'"),
        ('[x]\nmodel = "tiny"\nsleep-idle-seconds = "long"\n', "sleep_idle_seconds is 'long'; give a number"),
        ("[x\n", "--models-preset 'models.toml'"),
        ("", "there is no model in models.toml"),
    ],
)
def test_presets_that_cannot_be_used_are_named(several, tmp_path, text, told):
    (tmp_path / "models.toml").write_text(text)
    result, _, _ = several("--models-preset", "models.toml")
    assert result.exit_code != 0
    assert told in " ".join(f"{result.output} {result.exception}".split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--models-dir", "nowhere"), "--models-dir 'nowhere' cannot be read: No such file or directory"),
        (("--models-preset", "nowhere.toml"), "--models-preset 'nowhere.toml' cannot be read"),
        (("-m", "a=tiny", "-m", "a=tiny"), "two models have the name 'a'"),
        (("-m", "a=tiny", "-m", "b=tiny", "--models-max", "-1"), "models_max is -1"),
        (("-m", "tiny", "--sleep-idle-seconds", "-5"), "sleep_idle_seconds is -5"),
        (("-m", "a=nowhere.gguf", "-m", "b=nowhere.gguf"), "there is no model to serve"),
    ],
)
def test_models_that_are_not_there_are_named(several, arguments, told):
    result, _, _ = several(*arguments)
    assert result.exit_code != 0
    assert told in " ".join(f"{result.output} {result.exception}".split())


def test_two_files_of_one_name_are_refused(several, folder):
    shutil.copy(bundled_model(), folder / "in parts" / "b.gguf")
    result, _, _ = several("--models-dir", folder)
    assert result.exit_code != 0
    assert "have one name, 'b'; rename one of them" in result.output


def test_names_of_files_are_names_of_models(several, tmp_path):
    for name in ("d,e.gguf", "UPPER.GGUF"):
        shutil.copy(bundled_model(), tmp_path / name)
    assert list(several("--models-dir", ".")[1]) == ["UPPER", "d,e"]


def test_a_line_of_an_ini_file_is_that_of_the_file(several, tmp_path):
    (tmp_path / "m.ini").write_text("[a]\nmodel = tiny\n[a]\nmodel = tiny\n")
    assert "line 3" in several("--models-preset", "m.ini")[0].output


def test_options_for_several_models_are_no_option_of_one(several, monkeypatch):
    monkeypatch.setattr(run, "serve", lambda *arguments: None)
    assert "have no effect on a single model" in several("-m", "tiny", "--models-max", "2")[0].stderr


def test_a_model_has_its_own_time_to_sleep(several, tmp_path):
    (tmp_path / "m.toml").write_text('[a]\nmodel = "tiny"\nsleep-idle-seconds = 3\n[b]\nmodel = "tiny"\n')
    _, specs, pool = several("--models-preset", "m.toml", "--sleep-idle-seconds", "60")
    assert (specs["a"].sleep_idle_s, specs["b"].sleep_idle_s, pool.sleep_idle_s) == (3, None, 60)
