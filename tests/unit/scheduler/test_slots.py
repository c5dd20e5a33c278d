import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.scheduler.kv_cache import SlotPool


@given(st.integers(1, 20), st.lists(st.integers(0, 99)))
def test_the_lowest_free_id_is_leased(n_slots, moves):
    pool, leased = SlotPool(n_slots), set()
    for move in moves:
        if move % 2 and leased:
            slot = sorted(leased)[move % len(leased)]
            leased.remove(slot)
            pool.release(slot)
        elif pool.n_free:
            slot = pool.lease()
            assert slot == min(set(range(n_slots)) - leased)
            leased.add(slot)
        pool.check_integrity()
        assert pool.leased == leased
        assert pool.n_free == n_slots - len(leased)


def test_misuse_is_refused():
    pool = SlotPool(1)
    with pytest.raises(ValueError, match="slot 0 is not leased"):
        pool.release(0)
    pool.lease()
    with pytest.raises(ValueError, match="no slot is free"):
        pool.lease()
