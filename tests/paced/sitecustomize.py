"""Paces the steps of engines for tests. Python imports a module of this name in each process that a test starts,
because PYTHONPATH names the folder. tests/paced/__init__.py is the test's side."""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
import zlib

FILE = "LLAMABATCH_TEST_PACE"
"""The file that says how the steps of a test go; without it none waits."""

SPEED = "SPEED_OF_TESTED_STEPS"
"""`slow`: each step takes 20 times as long. `instant`: llama.cpp computes nothing, and the next token follows from the
last one and its position, so that a text is the same in any company."""

SLOWER = 20
MOST_S = 0.005  # most CPU seconds of a step that count; this is long for the bundled model
PATIENCE_S = 60  # seconds; a step is held no longer, so that a failing test ends


def wait_for_turn(runner):
    """Waits before a step, as long as the test says."""
    counted, steps, until = None, 0, time.monotonic() + PATIENCE_S
    while (order := _asked()) is not None:
        if order["number"] != counted:
            counted, before = order["number"], getattr(runner, "paced", (None, 0))  # the last order and step
            steps = before[1] + 1 if before[0] == counted else 1
            runner.paced = (counted, steps)
            time.sleep(order["step_s"])
        if steps <= order["most"] or time.monotonic() > until:
            return
        time.sleep(0.002)


def _asked():
    try:
        with open(os.environ[FILE], encoding="utf-8") as file:
            return json.load(file)
    except (KeyError, FileNotFoundError):
        return None


def paced(compute):
    """Returns a ModelRunner.run that waits for its turn before each step, and makes the step as slow as asked."""
    is_slow = os.environ.get(SPEED) == "slow"

    def run(self, batch):
        wait_for_turn(self)
        began = time.thread_time()  # CPU time, so that other programs do not count
        results = compute(self, batch)
        if is_slow:
            time.sleep((SLOWER - 1) * min(time.thread_time() - began, MOST_S))
        return results

    return run


def pace_runner(module):
    module.ModelRunner.run = paced(module.ModelRunner.run)
    if os.environ.get(SPEED) == "instant":
        sample = module.sample_rows

        def sample_rows(logits, states, *rest):
            if all(state.mask is state.chain is None for state in states):
                return logits.argmax(axis=1).tolist()
            return sample(logits, states, *rest)

        module.sample_rows = sample_rows


def pace_context(module):
    """Lets a decode compute nothing, if the speed is `instant`. Each of its rows then has one likely token."""
    if os.environ.get(SPEED) != "instant":
        return
    import numpy as np

    def decode(self, batch):
        rows = [i for i in range(batch.n_tokens) if batch.logits[i]]
        adapters = zlib.crc32(repr(self.adapters).encode())
        self.likely = [31 * batch.token[i] + 7 * batch.pos[i] + adapters for i in rows]
        return module.DecodeCode.OK

    def logits(self, n_rows):
        made = np.zeros((n_rows, self._n_vocab), np.float32)
        half = self._n_vocab // 2  # tokens from this id on are words
        for row, seed in zip(made, self.likely, strict=True):
            row[half + seed % (half // 2)] = 20
        return made

    module.Context.decode = decode
    module.Context.logits = logits


PACED = {"llamabatch.llama.model_runner": pace_runner, "llamabatch.llama.context": pace_context}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of PACED as Python does, and paces them when they have been imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in PACED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_pace(module):
            execute(module)
            PACED[name](module)

        spec.loader.exec_module = execute_and_pace
        return spec


def install():
    """Paces the modules of PACED in this process, now or when they are imported."""
    for name, pace in PACED.items():
        if name in sys.modules:
            pace(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


if __name__ == "sitecustomize":
    install()
