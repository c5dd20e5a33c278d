"""`llamabatch doctor` knows the extras of pyproject.toml."""

import re
from pathlib import Path

import pytest

from llamabatch.tools import doctor


def test_every_extra_of_the_project_is_named_with_its_packages():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name != "dev"}
    assert {name: [re.split(r"[\[<>=!~ ]", each)[0] for each in wanted] for name, wanted in extras.items()} == {
        name: list(extra.modules) for name, extra in doctor.EXTRAS.items()
    }
    assert all(extra.use for extra in doctor.EXTRAS.values())
