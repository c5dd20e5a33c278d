"""Ten seconds of the hour of mixed load: every request accounted for, and nothing left behind."""

import pytest

from tests.long import soak


def test_ten_seconds_of_it(tmp_path):
    soak.case(0, tmp_path, seconds=10)


def sample(t, **changed):
    plain = {"rss": 2e8, "threads": 16, "fds": 14, "child_rss": 1e8, "child_threads": 4, "child_fds": 8}
    return {"t": t, **plain, **changed}


def test_a_leak_is_seen():
    hour = [10.0 * i for i in range(360)]
    soak.check_flat([sample(t) for t in hour])
    soak.check_flat([sample(t, rss=2e8 + min(t, 600) * 1e5) for t in hour])  # it fills its caches
    for leak in ({"rss": 1e4}, {"child_rss": 1e4}, {"fds": 2e-3}, {"threads": 2e-3}):
        with pytest.raises(AssertionError, match=f"{next(iter(leak))} grew"):
            soak.check_flat([sample(t, **{k: sample(t)[k] + v * t for k, v in leak.items()}) for t in hour])
