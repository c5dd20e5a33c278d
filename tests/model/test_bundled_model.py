"""The bundled model is as good as its card promises."""

import subprocess
import sys
from pathlib import Path

from llamabatch.gguf.resolve import resolve

MODELS = Path(__file__).parents[2] / "models" / "tiny"


def test_at_most_6_mb():
    assert resolve("tiny").stat().st_size <= 6_000_000


def test_held_out_questions_are_answered_well_enough():
    """evaluate.py exits with 1 below 80 % right answers of a kind, or below 90 % over all."""
    done = subprocess.run([sys.executable, MODELS / "evaluate.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "over all" in done.stdout
