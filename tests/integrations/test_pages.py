"""The pages and examples of other people's frameworks run, if the framework is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model import test_docs, test_examples

ROOT = Path(__file__).parents[2]


# a section of clusters.md -> the module that it needs; each section runs alone
CLUSTERS = {"Dask": "dask.dataframe", "Spark": "pyspark", "Daft": "daft"}


@pytest.mark.parametrize("page", sorted({*test_docs.NEEDS} - {"clusters.md"}))
def test_page(page, tmp_path, monkeypatch):
    _offline(monkeypatch)
    test_docs.test_page(ROOT / "docs" / page, tmp_path)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_recipe_of(name, tmp_path):
    pytest.importorskip(CLUSTERS[name], reason=f"needs {CLUSTERS[name]} (make test-scale)")
    if name == "Spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    beginning, *sections = re.split(r"^## ", (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8"), flags=re.M)
    recipes = {each.partition("\n")[0]: each for each in sections}
    assert list(recipes) == [*CLUSTERS]
    code = "\n".join(re.findall(r"```python\n(.*?)```", beginning + recipes[name], flags=re.S))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", sorted(test_examples.NEEDS))
def test_example(example, monkeypatch):
    _offline(monkeypatch)
    test_examples.test_example(ROOT / "examples" / f"{example}.py")


def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
