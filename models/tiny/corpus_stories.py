"""The story grammar: one pool of sentences for each stage, so that no story says the same thing twice."""

from __future__ import annotations

import random
import re
from functools import cache

from corpus_tables import NAMES, STORY_PLACES, STORY_THINGS

NUMBER_WORDS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}

STAGES: dict[str, list[str]] = {
    "opening": [
        "One day, {n} went to the {p} with a {t}.",
        "It was a sunny morning when {n} came to the {p} and found a {t}.",
        "Once upon a time, {n} lived near the {p} and had a small {t}.",
        "{n} was walking by the {p} when {h} saw a {t} on the ground.",
        "Early on Monday, {n} took a {t} and walked to the {p}.",
    ],
    "look": [
        "The {t} was old, but it was very beautiful.",
        "The {t} was shiny and new, and {h} liked it very much.",
        "It was the best {t} that {h} had ever seen.",
        "Nobody else in the {p} had a {t} like this one.",
    ],
    "want": [
        "{n} wanted to show the {t} to a friend.",
        "{n} wanted to know who had made it.",
        "More than anything, {n} wanted to keep the {t}.",
        "{n} had a plan for the {t}.",
    ],
    "problem": [
        "Then a strong wind came and carried the {t} away.",
        "But suddenly the {t} fell into the water.",
        "Then it began to rain, and the {t} was lost.",
        "But a big dog took the {t} and ran off.",
        "Then {h} sat down to rest, and the {t} was gone.",
    ],
    "help": [
        "An old man at the {p} saw what had happened and offered to help.",
        "A little bird sang and showed {n} the way.",
        "A kind woman heard {n} and came to help.",
        "Two children from the {p} came to look for it too.",
    ],
    "action": [
        "{n} looked everywhere and did not give up.",
        "{n} ran as fast as {h} could and got the {t} back.",
        "After a long time, {n} found the {t} behind a tree.",
        "{n} was very brave and found the {t} before dark.",
    ],
    "ending": [
        "In the end, {n} went home with a smile.",
        "From that day on, {n} took good care of the {t}.",
        "That night, {n} slept well and dreamed of the {p}.",
        "{n} was happy and told everybody about it.",
        "And so {n} and the {t} came home safely.",
    ],
}

# What a story of this many sentences is made of.
PLANS: dict[int, list[str]] = {
    3: ["opening", "problem", "ending"],
    4: ["opening", "problem", "action", "ending"],
    5: ["opening", "look", "problem", "action", "ending"],
    6: ["opening", "look", "problem", "help", "action", "ending"],
    7: ["opening", "look", "want", "problem", "help", "action", "ending"],
}


def write_story(rng: random.Random, name: str, thing: str, place: str, sentences: int) -> str:
    """A story of exactly that many sentences that uses the name, the thing and the place."""
    pronoun = dict(NAMES)[name]
    lines = [rng.choice(STAGES[stage]) for stage in PLANS[sentences]]
    return " ".join(line.format(n=name, t=thing, p=place, h=pronoun) for line in lines)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each with its final mark; a rest without one is a sentence too."""
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]


@cache
def story_words() -> frozenset[str]:
    """Every lower-case word that a story may use: a garbled word is in no story."""
    text = " ".join(line for lines in STAGES.values() for line in lines)
    fixed = re.findall(r"[a-z]+", re.sub(r"\{.\}", " ", text).lower())
    return frozenset(fixed) | {"he", "she"} | {n.lower() for n, _ in NAMES} | set(STORY_THINGS) | set(STORY_PLACES)


def story_is_well_formed(text: str, name: str, thing: str, place: str, sentences: int | None) -> bool:
    """Right number of sentences, each begun and ended properly, none twice, no garbled word, the given three in it."""
    parts = split_sentences(text)
    wanted = range(3, 8) if sentences is None else (sentences,)
    if len(parts) not in wanted or len(set(parts)) != len(parts):
        return False
    if not all(part[0].isupper() and part[-1] in ".!?" for part in parts):
        return False
    words = re.findall(r"[A-Za-z]+", text)
    lower = {word.lower() for word in words}
    if not lower <= story_words():
        return False
    others = {n for n, _ in NAMES if n != name} & set(words)
    strangers = (set(STORY_THINGS) - {thing}) & lower | (set(STORY_PLACES) - {place}) & lower
    return not others and not strangers and name in words and thing in words and place in words
