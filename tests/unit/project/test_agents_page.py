"""docs/agents.md has the figures of the last `make test-agents`."""

import json

from tests.agents.figures import PAGE, RESULTS, table


def test_the_page_has_the_figures_that_are_committed():
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()
