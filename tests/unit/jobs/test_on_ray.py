"""`llamabatch run --ray`: the options that go together, and the message without Ray."""

import importlib.util

import pytest
from click.testing import CliRunner

from llamabatch.cli import cli


def told(tmp_path, *options):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    result = CliRunner().invoke(cli, ["run", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *options])
    assert result.exit_code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    return result.output + str(result.exception)


def test_ray_and_shards_go_together_and_without_a_plot(tmp_path):
    together = "--ray and --shards go together: --ray auto --shards 4"
    assert together in told(tmp_path, "--ray", "auto")
    assert together in told(tmp_path, "--shards", "4")
    assert "does not work with --ray" in told(tmp_path, "--ray", "auto", "--shards", "4", "--plot", "a.png")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named(tmp_path):
    assert "ray is not installed; run: pip install 'llamabatch[ray]'" in told(
        tmp_path, "--ray", "auto", "--shards", "4"
    )
