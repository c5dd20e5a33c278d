"""The Python in docs/*.md runs. The blocks of a page run one after another, as a reader would type them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from llamabatch.gguf.resolve import resolve
from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
from tests.model.encoder_files import write_encoder
from tests.sounds import write_tone

PAGES = {
    page: re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
}
# pages whose blocks only quote our code
QUOTES = {"architecture.md"}
# models that a page expects, by page: a kind of encoder_files.py -> the name of the file
MODELS = {"rerank.md": {"bert-rank": "reranker.gguf", "bert-classes": "emotions.gguf"}}

# packages that a page needs. tests/integrations runs these pages; their frameworks may write to stderr
NEEDS = {
    **{"lm_eval.md": "lm_eval", "langchain.md": "langchain_core", "inspect.md": "inspect_ai", "litellm.md": "litellm"},
    "clusters.md": "dask.dataframe pyspark daft",
    "ray.md": "ray.data",
    "ray_serve.md": "ray.serve",
}


def write_files(page: Path, folder: Path) -> None:
    """Writes the models, pictures and sounds that a page expects."""
    for name, file in MODELS.get(page.name, {}).items():
        write_encoder(name, folder / file)
    if page.name == "images.md":
        shutil.copy(resolve("tiny"), folder / "gemma.gguf")
        write_projector(folder / "mmproj-gemma.gguf", ProjectorShape("gemma3"), n_embd=192)
        for name in ("cat.png", "dog.jpg"):
            Image.new("RGB", (80, 60), "orange").save(folder / name)
    if page.name == "sounds.md":
        shutil.copy(resolve("tiny"), folder / "ultravox.gguf")
        write_projector(folder / "mmproj-ultravox.gguf", ProjectorShape("ultravox", n_merge=10), n_embd=192)
        for name in ("first call.wav", "second.wav"):
            write_tone(folder / name)


@pytest.mark.parametrize(
    "page", [page for page, blocks in PAGES.items() if blocks and page.name not in QUOTES], ids=lambda p: p.stem
)
def test_page(page, tmp_path):
    for module in NEEDS.get(page.name, "").split():
        pytest.importorskip(module, reason=f"needs {module} (make test-scale)")
        if module == "pyspark" and shutil.which("java") is None:
            pytest.skip("Spark needs Java")
    write_files(page, tmp_path)
    code = "\n".join(PAGES[page])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or page.name in NEEDS
