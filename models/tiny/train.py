"""Trains the bundled model on a CPU: the tokenizer, then the network, both from the generated corpus alone.

    python models/tiny/train.py --cache build/tiny

The loss counts answers only. Rows are packed with whole turns, so most answers are learnt with other turns before them;
a few rows are as long as the context, so that late positions are trained as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# Before torch loads its OpenMP: threads that spin at every barrier lose most of their time to any busy neighbour.
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
import torch.nn.functional as F
from chatml import TURN_END, system_prompt, train_tokenizer, turn_prompt
from corpus import KINDS, Generator, TrainingStream
from model import ModelConfig, TinyLlama
from tokenizers import Tokenizer
from torch import Tensor

SEED = 7
TOKENS_PER_STEP = 3072  # small steps and many of them: the network learns from the number of updates
ROW = 96  # two or three turns; the fastest length here
# (length, share of steps from START on). 192 holds any turn, the story of seven sentences included.
START = 0.3
LONGER_ROWS = ((192, 0.25), (1024, 0.04), (2048, 0.03))
COMPILED_ROWS = (96, 192)
WARM_UP = 0.02
SHARD_TURNS = 20_000


class PackedRows:
    """Endless rows of tokens with a weight for each: zero on prompts, and 1 / sqrt(length) on an answer's tokens,
    or stories would drown the two digits of a sum."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.stream = TrainingStream(seed)
        self.newline = tokenizer.encode("\n").ids
        self.turns = self._turns()

    def _turns(self) -> Iterator[tuple[list[int], list[int]]]:
        while True:
            turns = [self.stream.turn() for _ in range(SHARD_TURNS)]
            prompts = self.tokenizer.encode_batch_fast([turn_prompt(prompt) for prompt, _ in turns])
            answers = self.tokenizer.encode_batch_fast([answer + TURN_END for _, answer in turns])
            for prompt, answer in zip(prompts, answers, strict=True):
                yield prompt.ids, answer.ids

    def row(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        system = self.stream.system()
        tokens = self.tokenizer.encode(system_prompt(system)).ids if system else []
        weights = [0.0] * len(tokens)
        while len(tokens) <= length:
            prompt, answer = next(self.turns)
            tokens += prompt + answer + self.newline
            weights += [0.0] * len(prompt) + [len(answer) ** -0.5] * len(answer) + [0.0] * len(self.newline)
        return np.array(tokens[: length + 1]), np.array(weights[: length + 1], dtype=np.float32)

    def batch(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and the targets' weights, each (rows, length)."""
        rows = [self.row(length) for _ in range(max(1, TOKENS_PER_STEP // length))]
        tokens = torch.from_numpy(np.stack([tokens for tokens, _ in rows]))
        weights = torch.from_numpy(np.stack([weights for _, weights in rows]))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights[:, 1:].contiguous()


def answer_loss(model: TinyLlama, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Only rows of the answers ever meet the vocabulary."""
    wanted = weights.flatten() > 0
    logits = model.logits(hidden.flatten(0, 1)[wanted]).float()
    losses = F.cross_entropy(logits, targets.flatten()[wanted], reduction="none")
    kept = weights.flatten()[wanted]
    return (losses * kept).sum() / kept.sum()


@torch.no_grad()
def exact_answers(model: TinyLlama, tokenizer: Tokenizer, count: int = 100) -> dict[str, float]:
    """Share of fresh questions (trained templates, content never trained on) whose every answer token is the likeliest.

    For a question with one right answer that is greedy accuracy. Stories have many, so theirs says nothing.
    """
    generator = Generator(random.Random(SEED), held_out=True)
    generator.templates = TrainingStream(SEED).generator.templates
    found = {}
    for kind in KINDS:
        right = 0
        for _ in range(count):
            question = generator.question(kind)
            prompt = tokenizer.encode(turn_prompt(question.prompt)).ids
            answer = tokenizer.encode(question.answer + TURN_END).ids
            hidden = model(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
            right += model.logits(hidden).argmax(-1).tolist() == answer
        found[kind] = right / count
    return found


def make_optimizer(model: TinyLlama, rate: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or name.startswith("token_embd")]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def rate_at(progress: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


@dataclass
class Progress:
    """How far a run has come; kept in the checkpoint, so that an interrupted run goes on where it was."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # a running mean


class Trainer:
    def __init__(self, model: TinyLlama, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.args = args
        self.optimizer = make_optimizer(model, args.rate)
        self.done = Progress()
        self.checkpoint = args.cache / "checkpoint.pt"
        if args.resume and self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.done = Progress(**state["progress"])
        self.compiled: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False) if args.compile else model
        # The step joins the seed, so that a resumed run meets new questions and not the first ones again.
        self.rows = PackedRows(tokenizer, SEED + self.done.step)
        self.rng = np.random.default_rng(SEED + self.done.step)

    def run(self) -> Progress:
        done, args = self.done, self.args
        started = time.monotonic() - done.seconds
        while done.step < args.steps:
            loss = self.step(done.step / args.steps)
            done.step += 1
            done.loss = loss if done.step == 1 else 0.98 * done.loss + 0.02 * loss
            done.seconds = time.monotonic() - started
            if done.step % 250 == 0:
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(f"step {done.step} loss {done.loss:.4f} {done.seconds:.0f} s {memory} MiB", flush=True)
            if done.step % args.check_every == 0:
                print("  exact:", exact_answers(self.model, self.tokenizer, 40), flush=True)
                self.save()
        self.save()
        return done

    def step(self, progress: float) -> float:
        """One update; returns its loss."""
        lengths, shares = zip(*LONGER_ROWS, strict=True)
        length = ROW
        if progress > START:
            length = int(self.rng.choice([ROW, *lengths], p=[1 - sum(shares), *shares]))
        inputs, targets, weights = self.rows.batch(length)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = (self.compiled if length in COMPILED_ROWS else self.model)(inputs)
            loss = answer_loss(self.model, hidden, targets, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.rate * rate_at(progress)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done.tokens += inputs.numel()
        return loss.item()

    def save(self) -> None:
        """The checkpoint, and what export.py reads: the weights, and a report with the configuration."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.done),
        }
        torch.save(state, self.checkpoint)
        torch.save(self.model.state_dict(), self.args.cache / "model.pt")
        parameters = sum(p.numel() for p in self.model.parameters())
        report = {**asdict(self.model.config), **asdict(self.done), "parameters": parameters}
        (self.args.cache / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("build/tiny"), help="checkpoint and tokenizer go here")
    parser.add_argument("--steps", type=int, default=4200)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the cache")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="where no C++ compiler is at hand")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)

    config = ModelConfig()
    stream = TrainingStream(SEED + 1)
    texts = [text for _ in range(40_000) for text in stream.turn()]
    tokenizer = train_tokenizer(texts, config.vocab_size)
    tokenizer.save(str(args.cache / "tokenizer.json"))
    model = TinyLlama(config)
    print(Trainer(model, tokenizer, args).run())
    print("exact:", exact_answers(model, tokenizer))


if __name__ == "__main__":
    main()
