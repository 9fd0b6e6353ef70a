"""Prompts for measurements: text of a known length that no cache has seen, and questions with long answers."""

import random

# Each is one token of SmolLM2 with a leading space; other tokenizers come close.
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")

LONG_ANSWERS = (
    "Tell me a long story about a lighthouse keeper.",
    "Explain in detail how bread is made.",
    "Describe the history of the bicycle at length.",
    "Write a long essay about the sea.",
    "Tell me a long story about two brothers and a river.",
    "Explain in detail how a steam engine works.",
    "Describe a walk through a large city at length.",
    "Write a long letter from a traveller to her sister.",
)


def words(count: int, seed: int) -> str:
    """`count` random words; another seed shares no prefix worth caching."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(count))
