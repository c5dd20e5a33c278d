"""A page of docs/ names the packages that its examples import; `make test-pages` runs them with these alone."""

import re
import sys

import pytest

from tests.model.test_docs import PAGES, QUOTES
from tests.pages.__main__ import packages

# modules that no dependency of llamabatch installs -> words of the packages that install them
BROUGHT_BY = {
    **{"starlette": "llamabatch[server", "gguf": "tools]", "pydantic": "pydantic|langchain", "httpx": "httpx"},
    **{"pandas": "pandas|dask|ray", "polars": "polars", "pyarrow": "parquet]", "dask": "dask", "pyspark": "pyspark"},
    **{"daft": "daft", "ray": "ray", "langchain_core": "langchain", "litellm": "litellm", "lm_eval": "lm-eval"},
    **{"inspect_ai": "inspect"},
}


@pytest.mark.parametrize(
    "page", [page for page, blocks in PAGES.items() if blocks and page.name not in QUOTES], ids=lambda page: page.stem
)
def test_a_page_names_the_packages_of_its_examples(page):
    named, code = " ".join(packages(page)), "\n".join(PAGES[page])
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", code, flags=re.M))
    for module in imported - sys.stdlib_module_names - {"llamabatch", "numpy"}:
        assert any(word in named for word in BROUGHT_BY[module].split("|")), module
    assert "httpx2" in named or "TestClient" not in code  # Starlette's TestClient needs it
