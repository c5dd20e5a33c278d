"""Prompts from the lines of a file and from request bodies of a server."""

import pytest

from llamabatch.errors import PromptError
from llamabatch.jobs.input.lines import text_or_ids
from llamabatch.request.sampling_params import MAX_TOKEN_ID


@pytest.mark.parametrize("bad", [True, -1, MAX_TOKEN_ID + 1, 1.0])
def test_each_token_id_of_a_prompt_is_checked(bad):
    assert text_or_ids("prompt", [0, 7, MAX_TOKEN_ID]) == (0, 7, MAX_TOKEN_ID)
    with pytest.raises(PromptError, match=f"a token id of prompt is {bad}"):
        text_or_ids("prompt", [7, bad])
