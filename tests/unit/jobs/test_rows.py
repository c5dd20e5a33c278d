"""The options of a job: what they refuse."""

import pytest

from llamabatch.errors import ConfigError
from llamabatch.jobs.rows import ReadOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": (0, 4)}, "shard is 0; give a whole number from 1 to 4"),
        ({"shard": (5, 4)}, "shard is 5; give a whole number from 1 to 4"),
        ({"shard": (1, 0)}, "the number of shards is 0"),
        ({"shard": "1/4"}, "shard is '1/4'"),
        ({"limit": 0}, "limit is 0; give a whole number from 1"),
        ({"limit": True}, "limit is True"),
        ({"max_line_bytes": 1}, "max_line_bytes is 1"),
        ({"task": "chatt"}, "did you mean 'chat'"),
        ({"system": "be kind"}, "give task='chat'"),
    ],
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError) as refused:
        ReadOptions(**options)
    assert message in str(refused.value)
