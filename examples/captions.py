"""Captions for the pictures of a folder, all at once, as a CSV table.

    python captions.py MODEL.gguf MMPROJ.gguf FOLDER

Without arguments, the script uses the bundled model and an encoder with random weights. The captions then mean nothing.
"""

import csv
import sys
import tempfile
from pathlib import Path

from llamabatch import LLM, SamplingParams

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}


def sample(folder: Path) -> tuple[str, Path, Path]:
    """Makes an mmproj file and pictures to try; returns the model, the mmproj file and the folder of pictures."""
    from PIL import Image

    from llamabatch.tools.synth.projectors import ProjectorShape, write_projector

    write_projector(folder / "mmproj.gguf", ProjectorShape("gemma3"), n_embd=192)
    for colour in ("red", "green", "blue"):
        Image.new("RGB", (64, 64), colour).save(folder / f"{colour}.png")
    return "tiny", folder / "mmproj.gguf", folder


def caption(model: str, mmproj: Path, folder: Path) -> None:
    pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
    ask = {"type": "text", "text": "Describe this picture in one sentence."}
    conversations = [[{"role": "user", "content": [{"type": "image", "image": path}, ask]}] for path in pictures]
    with LLM(model, mmproj=mmproj) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=60), errors="return")
    table = csv.writer(sys.stdout)
    table.writerow(["picture", "caption", "error"])
    for path, output in zip(pictures, outputs, strict=True):
        table.writerow([path.name, output.text.strip(), output.error or ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        caption(
            *(sys.argv[1:2] + [Path(each) for each in sys.argv[2:4]] if len(sys.argv) == 4 else sample(Path(place)))
        )
