"""The toolkit of `make cuda-build`: the one of nvcc, or a folder of links to it and to cuBLAS."""

import os
import stat
import zipfile
from pathlib import Path

import pytest

from llamabatch.native_build.tools import SetupFailure
from tests.cuda import toolkit


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A toolkit without cuBLAS. A script elsewhere on PATH calls its nvcc."""
    own = tmp_path / "cuda-13.0"
    for folder in ("bin", "include", "lib"):
        (own / folder).mkdir(parents=True)
    (own / "include" / "cuda.h").write_text("cuda")
    (own / "lib" / "libcudart.so.13").write_text("cudart")
    (own / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
    nvcc = own / "bin" / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"\n'
        f'else echo "#\\$ TOP={own}/bin/.." >&2; fi\n'
    )
    (tmp_path / "path").mkdir()
    called = tmp_path / "path" / "nvcc"
    called.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    for script in (nvcc, called):
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{called.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    for name in ("CMAKE_ARGS", "CUDAARCHS", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit, "has_driver", lambda: False)
    return own


@pytest.fixture
def index(monkeypatch):
    """Replaces the package index. Returns the list of requirements that pip is asked for."""
    asked = []

    def pip(command, log, title):
        asked.append(command[-1])
        with zipfile.ZipFile(Path(command[-2]) / "cublas.whl", "w") as wheel:
            wheel.writestr("nvidia/cu13/include/cublas_v2.h", "cublas")
            wheel.writestr("nvidia/cu13/lib/libcublas.so.13", "library")
        return 0

    monkeypatch.setattr(toolkit, "run_logged", pip)
    return asked


def test_a_toolkit_that_is_whole_is_taken(own, index):
    (own / "include" / "cublas_v2.h").touch()
    assert toolkit.whole_toolkit() == own
    assert index == []


def test_links_to_a_toolkit_and_cublas_among_them(own, index, tmp_path):
    whole = toolkit.whole_toolkit()
    assert whole == tmp_path / "cache" / "cuda" / "toolkit-13.0"
    assert (whole / "include" / "cuda.h").read_text() == "cuda"
    assert (whole / "include" / "cuda.h").is_symlink()
    assert (whole / "lib" / "libcudart.so").read_text() == "cudart"
    assert (whole / "include" / "cublas_v2.h").read_text() == "cublas"
    assert (whole / "lib" / "libcublas.so").read_text() == "library"
    assert not (own / "include" / "cublas_v2.h").exists()
    assert toolkit.whole_toolkit() == whole
    assert index == ["nvidia-cublas==13.0.*"]
    assert sorted(os.listdir(whole.parent)) == ["lock", "toolkit-13.0"]


def test_the_variables_of_a_build(own, index, monkeypatch):
    found = toolkit.environment()
    whole = toolkit.whole_toolkit()
    assert found["PATH"].startswith(f"{whole / 'bin'}{os.pathsep}")
    assert found["LD_LIBRARY_PATH"] == str(whole / "lib")
    assert (found["CUDAARCHS"], found["CMAKE_ARGS"]) == ("90", "-DGGML_CUDA_NO_VMM=ON")
    monkeypatch.setenv("CMAKE_ARGS", "-DX=1")
    monkeypatch.setenv("CUDAARCHS", "80;90")
    assert toolkit.environment()["CMAKE_ARGS"] == "-DX=1 -DGGML_CUDA_NO_VMM=ON"
    assert toolkit.environment()["CUDAARCHS"] == "80;90"
    monkeypatch.setattr(toolkit, "has_driver", lambda: True)
    assert toolkit.environment()["CMAKE_ARGS"] == "-DX=1"


def test_what_is_not_to_be_had_is_said(own, monkeypatch):
    monkeypatch.setattr(toolkit, "run_logged", lambda *_: 1)
    with pytest.raises(SetupFailure, match=r"nvidia-cublas 13\.0 is not to be had"):
        toolkit.whole_toolkit()
    monkeypatch.setenv("PATH", str(own))
    with pytest.raises(SetupFailure, match="nvcc is not on PATH"):
        toolkit.whole_toolkit()
