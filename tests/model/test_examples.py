"""Every example runs, is short, and states its purpose."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

# packages that an example needs; their frameworks may write to stderr
NEEDS = {
    **{"with_lm_eval": "lm_eval", "with_langchain": "langchain_core"},
    **{"with_inspect": "inspect_ai", "with_litellm": "litellm", "with_openai": "openai"},
    "with_ray": "ray.data",
    "with_ray_serve": "ray.serve openai",
}


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path):
    if path.stem in NEEDS:
        for module in NEEDS[path.stem].split():
            pytest.importorskip(module, reason=f"needs {module} (make test-scale)")
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) < 60
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or path.stem in NEEDS
    assert done.stdout.strip()
