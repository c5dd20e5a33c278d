"""The mmproj file that goes with a model: beside it, or in its repository."""

import pytest

from llamabatch.errors import ModelFileError
from llamabatch.gguf.mmproj import choose, resolve_mmproj
from llamabatch.gguf.resolve import resolve
from llamabatch.tools.synth.projectors import ProjectorShape, write_projector


@pytest.mark.parametrize(
    ("names", "model", "chosen"),
    [
        (["mmproj-model-f16.gguf", "gemma-3-4b-it-Q4_K_M.gguf"], "gemma-3-4b-it-Q4_K_M.gguf", "mmproj-model-f16.gguf"),
        (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "Qwen3-VL-4B-Q4_K_M.gguf", "mmproj-F16.gguf"),
        (["mmproj-a-4b-Q8_0.gguf", "mmproj-b-2b-f16.gguf"], "b-2b-Q8_0.gguf", "mmproj-b-2b-f16.gguf"),
        (["Q2.5-VL-3B-mmproj-f32.gguf", "Q2.5-VL-3B-mmproj-Q8_0.gguf"], "Q4_K_M", "Q2.5-VL-3B-mmproj-Q8_0.gguf"),
    ],
)  # fmt: skip
def test_the_file_of_a_model_is_chosen_by_its_name(names, model, chosen):
    assert choose(names, model, "here") == chosen


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.gguf"], "here has no file with mmproj in its name"),
        (
            ["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"],
            "here has mmproj-a-f16.gguf, mmproj-b-f16.gguf; give the path",
        ),
    ],
)
def test_none_or_several_are_refused_by_name(names, message):
    with pytest.raises(ModelFileError, match=message):
        choose(names, "c.gguf", "here")


def test_auto_is_the_file_in_the_folder_of_the_model(tmp_path, monkeypatch):
    (tmp_path / "a b.gguf").write_bytes(resolve("tiny").read_bytes())
    write_projector(tmp_path / "mmproj-a b.gguf", ProjectorShape("mlp"), 192, seed=1)
    monkeypatch.chdir(tmp_path)
    assert resolve_mmproj("auto", "a b.gguf") == tmp_path / "mmproj-a b.gguf"
    assert resolve_mmproj("mmproj-a b.gguf", "tiny") == tmp_path / "mmproj-a b.gguf"
    with pytest.raises(ModelFileError, match="no folder is known for tiny"):
        resolve_mmproj("auto", "tiny")
