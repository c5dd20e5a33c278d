"""The order of the builds of llama.cpp, with made-up packages of which nothing is imported."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from llamabatch.errors import SetupError
from llamabatch.native_build import source
from llamabatch.planning import binding_choice
from llamabatch.planning.binding_choice import MARKER, Origin, choose, for_children, reject


def package(parent, name, *, marker=None, libraries=("libllama.so", "libggml-cpu.so")):
    """Makes a package with one of the two layouts. Its binding cannot be imported."""
    folder = Path(parent) / name
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    if name == "llamabatch_llama":
        (folder / "_binding").mkdir()
        (folder / "_binding" / "__init__.py").touch()
    else:
        (folder / "llama_cpp.py").touch()
    for library in libraries:
        (folder / "lib" / library).write_bytes(b"code")
    if marker is not None:
        (folder / MARKER).write_text(json.dumps(marker))
    return folder


def marker(**changed):
    """Returns the marker of a build with this release's patches."""
    hashes = {"patches": source.patches(), "kernels": source.kernels()}
    facts = {name: {file.name: source.sha256_of(file) for file in files} for name, files in hashes.items()}
    return facts | {"backend": "cpu", "cpu_flags": []} | changed


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An environment without any llama.cpp. `site` is its only folder of packages, `builds` the cache of builds.

    `tried` collects the folders that a child tried. `ends` maps a folder to the child's exit code and answer.
    """
    place = SimpleNamespace(site=tmp_path / "site", builds=tmp_path / "cache" / "builds", tried=[], ends={})
    place.site.mkdir()
    place.builds.mkdir(parents=True)
    for name in ("LLAMABATCH_LLAMA", "LLAMA_CPP_LIB_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(place.site)])
    for name in [name for name in sys.modules if name.split(".")[0] in ("llama_cpp", "llamabatch_llama")]:
        monkeypatch.delitem(sys.modules, name)

    def run(program, *, timeout_s, environment):
        folder = Path(environment["LLAMABATCH_LLAMA"])
        place.tried.append(folder)
        end = place.ends.get(folder, (0, {"gpus": ["a card"]}))
        if isinstance(end, Exception):
            raise end
        return SimpleNamespace(returncode=end[0], stdout=b"ggml: a line\n" + json.dumps(end[1]).encode() + b"\n")

    monkeypatch.setattr(binding_choice, "run_program", run)
    binding_choice.forget()
    yield place
    binding_choice.forget()


def chosen():
    binding_choice.forget()
    return choose().build


def imported(monkeypatch, folder, libraries=None):
    module, inner = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_cpp")
    module.__file__ = str(folder / "__init__.py")
    inner._lib = SimpleNamespace(_name=str((libraries or folder / "lib") / "libllama.so"))
    module.llama_cpp = inner
    monkeypatch.setitem(sys.modules, "llama_cpp", module)


def test_the_order(place, monkeypatch, tmp_path):
    """The places are filled from the last one of the order to the first. Each new one wins over those behind it."""
    stock = package(place.site, "llama_cpp")
    assert (chosen().origin, chosen().folder, chosen().module) == (Origin.INSTALLED, stock, "llama_cpp")
    wheel = package(place.site, "llamabatch_llama", marker=marker())
    assert (chosen().origin, chosen().folder, chosen().module) == (Origin.WHEEL, wheel, "llamabatch_llama._binding")
    (stock / "lib" / "libggml-cuda.so").touch()
    assert (chosen().origin, chosen().folder) == (Origin.GPU, stock)
    built = package(place.builds / "1", "llamabatch_llama", marker=marker())
    assert (chosen().origin, chosen().folder) == (Origin.BUILT, built)
    elsewhere = package(tmp_path / "elsewhere", "llama_cpp")
    imported(monkeypatch, elsewhere)
    assert (chosen().origin, chosen().folder) == (Origin.IMPORTED, elsewhere)
    monkeypatch.setenv("LLAMABATCH_LLAMA", str(tmp_path / "elsewhere"))
    assert (chosen().origin, chosen().folder) == (Origin.NAMED, elsewhere)
    monkeypatch.setenv("LLAMABATCH_LLAMA", str(place.builds / "1"))
    assert (chosen().origin, chosen().folder) == (Origin.NAMED, built)
    assert [other.origin for other in choose().others] == [Origin.IMPORTED, Origin.GPU, Origin.WHEEL]
    monkeypatch.delenv("LLAMABATCH_LLAMA")
    imported(monkeypatch, stock)
    binding_choice.forget()
    assert [choose().build.origin, *(other.origin for other in choose().others)] == [
        Origin.IMPORTED, Origin.BUILT, Origin.WHEEL
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["cuda", "vulkan", "metal", "cpu"])
def test_a_backend_for_gpus_shows_in_the_marker(place, backend):
    package(place.site, "llama_cpp", marker=marker(backend=backend))
    package(place.site, "llamabatch_llama", marker=marker())
    assert chosen().origin is (Origin.WHEEL if backend == "cpu" else Origin.GPU)


@pytest.mark.parametrize("library", ["libggml-vulkan.so", "ggml-hip.dll", "libggml-metal.dylib", "libggml-cuda.so.0"])
def test_a_backend_for_gpus_shows_in_the_names_of_the_libraries(place, library):
    package(place.site, "llama_cpp", libraries=("libllama.so", library))
    package(place.site, "llamabatch_llama", marker=marker())
    assert chosen().origin is Origin.GPU


def test_a_build_for_gpus_without_a_gpu_is_passed_over(place):
    stock = package(place.site, "llama_cpp", libraries=("libggml-cuda.so",))
    wheel = package(place.site, "llamabatch_llama", marker=marker())
    place.ends[stock] = (0, {"gpus": []})
    assert choose().build.folder == wheel
    assert [(each.build.folder, each.reason) for each in choose().passed_over] == [(stock, "it finds no GPU here")]


@pytest.mark.parametrize(
    ("end", "words", "kept"),
    [
        ((0, {"problem": "it has no llama_decode"}), "it has no llama_decode", True),
        ((-signal.SIGILL, {}), r"crashes the process that loads it \(SIGILL\)", True),
        ((-signal.SIGKILL, {}), r"\(SIGKILL\)", False),
        ((-77, {}), r"\(signal 77\)", False),
        ((1, {}), "exit code 1", False),
        (subprocess.TimeoutExpired("child", 60), "within 60 s", False),
    ],
)
def test_a_broken_build_is_passed_over_with_its_reason(place, end, words, kept):
    wheel = package(place.site, "llamabatch_llama", marker=marker())
    stock = package(place.site, "llama_cpp")
    place.ends[wheel] = end
    for _ in range(2):
        assert chosen().folder == stock
        [passed] = choose().passed_over
        assert passed.build.folder == wheel
        assert re.search(words, passed.reason)
    assert (len(place.tried) == 1) == kept
    assert stock not in place.tried


def test_a_verdict_is_kept_until_a_file_of_the_build_changes(place):
    wheel = package(place.site, "llamabatch_llama", marker=marker())
    package(place.site, "llama_cpp")
    assert chosen() == chosen()
    assert place.tried == [wheel]
    (wheel / "lib" / "libllama.so").write_bytes(b"other code")
    place.ends[wheel] = (0, {"problem": "broken"})
    assert chosen().origin is Origin.INSTALLED
    assert place.tried == [wheel] * 2


def test_the_last_one_is_not_tried(place):
    package(place.site, "llama_cpp")
    assert chosen().origin is Origin.INSTALLED
    assert place.tried == []


def test_where_no_child_can_be_started_the_build_is_taken(place):
    wheel = package(place.site, "llamabatch_llama", marker=marker())
    package(place.site, "llama_cpp")
    place.ends[wheel] = OSError("no processes left")
    assert chosen().folder == wheel


def test_the_newest_build_of_the_cache_that_fits_is_taken(place):
    for age, (key, changed) in enumerate(
        {
            "other-cpu": {"cpu_flags": ["sse2", "hyperdrive"]},
            "other-patches": {"patches": {"0001-other.patch": "hash"}},
            "newer": {},
            "older": {},
        }.items()
    ):
        folder = package(place.builds / key, "llamabatch_llama", marker=marker(**changed))
        os.utime(folder / MARKER, (10**9 - age,) * 2)
    damaged = package(place.builds / "damaged", "llamabatch_llama", marker=[])
    os.utime(damaged / MARKER, (10**9 + 1,) * 2)
    choice = choose()
    assert choice.build.folder.parent.name == "newer"
    reasons = {each.build.folder.parent.name: each.reason for each in choice.passed_over}
    assert "cannot be read" in reasons.pop("damaged")
    assert "hyperdrive, which this one lacks" in reasons.pop("other-cpu")
    assert "with other patches: run `llamabatch build`" in reasons.pop("other-patches")
    assert reasons == {}


def test_nothing_at_all_is_an_error_with_a_cure(place):
    with pytest.raises(SetupError, match=r"^no llama\.cpp is installed: run `make setup`.*\.$"):
        choose()
    assert for_children() == {}


def test_a_refused_build_gives_way_to_the_next_and_the_last_ends_with_all_reasons(place):
    wheel = package(place.site, "llamabatch_llama", marker=marker())
    stock = package(place.site, "llama_cpp")
    reject(choose().build, "the first reason")
    assert choose().build.folder == stock
    with pytest.raises(SetupError, match=r"the first reason.*the second reason.*make setup"):
        reject(choose().build, "the second reason")
    assert wheel in place.tried


@pytest.mark.parametrize("variable", ["LLAMABATCH_LLAMA", "LLAMA_CPP_LIB_PATH"])
def test_a_named_build_is_used_or_refused(place, monkeypatch, variable, tmp_path):
    package(place.site, "llama_cpp")
    package(place.site, "llamabatch_llama", marker=marker())
    named = package(tmp_path / "named", "llama_cpp")
    monkeypatch.setenv(variable, str(named if variable == "LLAMABATCH_LLAMA" else named / "lib"))
    assert choose().build.origin is Origin.NAMED
    assert choose().build.libraries == named / "lib"
    with pytest.raises(SetupError, match=f"that {variable} names .*cannot be used: it is broken"):
        reject(choose().build, "it is broken")


def test_wrong_names_are_refused(place, monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(SetupError, match="llama-cpp-python is not installed"):
        choose()
    monkeypatch.setenv("LLAMABATCH_LLAMA", str(tmp_path))
    with pytest.raises(SetupError, match="are both set"):
        choose()
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH")
    with pytest.raises(SetupError, match="not the folder of a llamabatch_llama or llama_cpp package"):
        choose()


def test_the_choice_of_a_process_stays_and_its_children_make_the_same(place, monkeypatch, tmp_path):
    stock = package(place.site, "llama_cpp")
    assert for_children() == {"LLAMABATCH_LLAMA": str(stock)}
    package(place.builds / "1", "llamabatch_llama", marker=marker())
    assert choose().build.folder == stock
    monkeypatch.setenv("LLAMABATCH_LLAMA", for_children()["LLAMABATCH_LLAMA"])
    assert chosen().folder == stock
    monkeypatch.delenv("LLAMABATCH_LLAMA")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "some libraries")
    monkeypatch.chdir(tmp_path)
    binding_choice.forget()
    assert for_children() == {"LLAMA_CPP_LIB_PATH": str(tmp_path / "some libraries")}


def test_libraries_of_an_imported_binding_come_with_it(place, monkeypatch, tmp_path):
    stock = package(place.site, "llama_cpp")
    imported(monkeypatch, stock, tmp_path / "moved")
    assert (chosen().origin, chosen().libraries) == (Origin.IMPORTED, tmp_path / "moved")
    assert for_children() == {"LLAMA_CPP_LIB_PATH": str(tmp_path / "moved")}
