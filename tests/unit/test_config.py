"""ResolvedConfig: no choice is left open, and what crosses to a child is what a caller could write."""

from dataclasses import fields, replace

import pytest

from llamabatch.config import EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError
from tests.unit.configs import resolved


@pytest.mark.parametrize(
    "options",
    [
        {name: "auto"}
        for name in ("strategy", "kv", "n_slots", "n_ctx", "n_ubatch", "n_threads", "instances", "kv_cells")
    ]
    + [{"kv": "unified"}, {"kv_cells": 4096}],
)
def test_an_open_choice_is_refused(options):
    with pytest.raises(ConfigError, match=" is "):
        resolved(**options)


@pytest.mark.parametrize("layout", [{}, {"kv": "unified", "kv_cells": 8192}])
def test_the_asked_options_are_those_of_a_caller(layout):
    config = resolved(n_slots=3, **layout)
    asked = config.asked()
    assert type(asked) is EngineConfig
    assert asked.kv_cells == layout.get("kv_cells", "auto")
    assert all(getattr(asked, f.name) == getattr(config, f.name) for f in fields(config) if f.name != "kv_cells")
    assert asked.asked() is asked


def test_both_have_the_same_options_in_the_same_order():
    assert [f.name for f in fields(ResolvedConfig)] == [f.name for f in fields(EngineConfig)]


def test_the_draft_model_shares_no_cells_and_guesses_nothing():
    config = resolved(kv="unified", kv_cells=8192, speculate="draft", draft_model="tiny")
    draft = config.for_draft_model()
    assert (draft.kv, draft.kv_cells, draft.speculate, draft.draft_model) == ("split", 0, "off", None)


def test_one_engine_of_several_has_its_share_of_the_slots():
    config = resolved(n_slots=5, start_slots=3, instances=2)
    one = config.for_one_engine()
    assert (one.n_slots, one.start_slots, one.instances) == (3, 2, 1)
    children = replace(config, strategy="multi-instance")
    assert children.for_one_engine() is children
