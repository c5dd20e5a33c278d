"""docs/names.md names every field of SamplingParams and every alias."""

import re
from dataclasses import fields
from pathlib import Path

from llamabatch import SamplingParams
from llamabatch.config import _AS_HERE as OPTIONS_AS_HERE
from llamabatch.config import ALIASES as OPTIONS
from llamabatch.request.sampling_params import _AS_HERE, ALIASES
from llamabatch.utils.aliases import MODEL_NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "names.md").read_text(encoding="utf-8")


def test_every_field_and_alias_is_on_the_page():
    first_column = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `"))
    ours = set(re.findall(r"`(\w+)`", first_column))
    assert {field.name for field in fields(SamplingParams)} - ours == set()
    bold = set(re.findall(r"\*\*`(\w+)`\*\*", PAGE))
    assert bold - {*ALIASES, *OPTIONS, *MODEL_NAMES} == set(), "named as understood, but is no alias"
    assert {*ALIASES, *OPTIONS, *MODEL_NAMES} - bold == set()
    assert {*_AS_HERE, *OPTIONS_AS_HERE} - set(re.findall(r"`(\w+)`", PAGE)) == set()
