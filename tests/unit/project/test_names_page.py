"""docs/names.md names every field of SamplingParams and every alias."""

import re
from dataclasses import fields
from pathlib import Path

from llamabatch import SamplingParams
from llamabatch.request.sampling_params import ALIASES

PAGE = (Path(__file__).parents[3] / "docs" / "names.md").read_text(encoding="utf-8")


def test_every_field_and_alias_is_on_the_page():
    first_column = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `"))
    ours = set(re.findall(r"`(\w+)`", first_column))
    assert {field.name for field in fields(SamplingParams)} - ours == set()
    bold = set(re.findall(r"\*\*`(\w+)`\*\*", PAGE))
    assert bold - set(ALIASES) == set(), "named as understood, but is no alias"
    assert set(ALIASES) - set(re.findall(r"`(\w+)`", PAGE)) == set()
