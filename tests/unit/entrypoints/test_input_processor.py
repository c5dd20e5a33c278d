"""Prompts as token ids."""

import pytest

from llamabatch.config import EngineConfig
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.testing.answers import Script
from llamabatch.testing.fake_client import FakeClient


@pytest.mark.parametrize(
    ("before", "ids", "wanted"),
    [
        ([1, 5, 6], [1, 7, 8], (1, 5, 6, 7, 8)),
        ([1, 5, 6], [7, 1, 8], (1, 5, 6, 7, 1, 8)),
        ([1, 5, 6], [1, 7, 2], (1, 5, 6, 7, 2)),
        ([1, 5, 6], [], (1, 5, 6)),
        ([], [1, 7], (1, 7)),
    ],
)
@pytest.mark.parametrize("around", [[], [1], [1, 2]])  # ids that the vocabulary puts around a text
def test_ids_behind_others_have_no_bos_of_their_own(around, before, ids, wanted):
    client = FakeClient(EngineConfig.from_options("fake", {}), Script(None, None, None, None, None))
    client.model.tokenize = lambda text: around
    client.model.special_ids = {"bos": 1, "eos": 2}
    processor = InputProcessor(client)
    assert processor.behind(before, ids) == wanted
    client.model.special_ids = {}
    assert processor.behind(before, ids) == (*before, *ids)
