import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.engine.stats import EngineStats, percentile
from llamabatch.request.outputs import Timings


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_percentile_of_nothing():
    assert percentile([], 50) is None


def test_derived_figures():
    stats = EngineStats(decode_calls=4, decode_rows=10, decode_passes=6) + EngineStats(decode_calls=1, decode_rows=5)
    assert stats.rows_per_step == 3
    assert stats.passes_per_step == pytest.approx(6 / 5)
    assert EngineStats().rows_per_step == 0
    timings = Timings(token_times_s=(1.0, 1.5, 2.5))
    assert timings.inter_token_s == (0.5, 1.0)
    assert timings.generation_tps == pytest.approx(2 / 1.5)
    assert Timings(token_times_s=(1.0,)).generation_tps is None
