"""Ten seconds of the hour of mixed load: every request is counted, and nothing is left behind."""

from tests.long import soak


def test_ten_seconds_of_it(tmp_path):
    soak.case(0, tmp_path, seconds=10)
