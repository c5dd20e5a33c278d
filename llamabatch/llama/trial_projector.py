"""A program: `python -m llamabatch.llama.trial_projector MMPROJ MODEL` loads an mmproj file as an engine does.

A crash then ends only this process, not an engine. Exit status 0: the file can be loaded. 3: it was refused; the reason
is on stdout as JSON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llamabatch.errors import LlamaBatchError
from llamabatch.llama import library
from llamabatch.llama.probe import no_core_dump
from llamabatch.llama.projector import Projector
from llamabatch.llama.trial_load import refused
from llamabatch.media.sounds import LEAST_S
from llamabatch.request.media import SOUND, Media
from llamabatch.utils.lifetime import end_with_parent, leave_signals_to_parent
from llamabatch.utils.paths import one_line

# Common and extreme sizes of pictures, because preprocessors assert on some sizes.
_SIZES = ((1, 1), (64, 64), (640, 480), (3000, 20), (20, 3000), (4000, 3000))

_SECONDS = (LEAST_S, 1.0, 30.0, 61.7)


def run(path: Path, model_path: Path) -> int:
    """Loads the file with its model's vocabulary and counts tokens of pictures and audio. Returns the exit status."""
    llama = library.load()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(os.fsencode(model_path), params)
    try:
        projector = Projector(path, llama, model, n_embd=0, n_threads=1, use_gpu=False, plans=True)
        for size in _SIZES if projector.reads_pictures else ():
            projector.tokens(Media(b"", *size))
        for seconds in _SECONDS if projector.sound_rate else ():
            projector.tokens(Media(b"", int(seconds * projector.sound_rate), 1, SOUND))
    except LlamaBatchError as error:
        reason = str(error).removeprefix(f"mmproj {one_line(path)} cannot be loaded: ")
        return refused(reason)
    return 0


if __name__ == "__main__":
    end_with_parent()
    leave_signals_to_parent()
    no_core_dump()
    code = run(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)  # freeing the model would show nothing new
