"""Prompts of the lines of a file and of the bodies of a server."""

from llamabatch.jobs.input import lines
from llamabatch.request.sampling_params import MAX_TOKEN_ID


def test_plain_token_ids_are_checked_together(monkeypatch):
    checked = []
    monkeypatch.setattr(lines, "integer", lambda error, name, value, low, high: checked.append(value))
    assert lines.text_or_ids("prompt", [0, 7, MAX_TOKEN_ID]) == (0, 7, MAX_TOKEN_ID)
    assert checked == []
    for given in ([7, True], [7, -1], [7, MAX_TOKEN_ID + 1], [7, 1.0]):
        lines.text_or_ids("prompt", given)
    assert checked == [7, True, 7, -1, 7, MAX_TOKEN_ID + 1, 7, 1.0]
