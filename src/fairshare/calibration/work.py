"""The requests of a calibration: prompts and answers of drawn lengths, in an order that a seed repeats."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fairshare.simulator.lengths import Lengths

FIRST_TOKEN, LAST_TOKEN = 300, 1900
"""Prompts are written as token ids from here: below are special tokens, and above what a small vocabulary has."""

REPEATED_PROMPTS = 4
"""So many different prompts are sent again and again where the cost of cached tokens is measured."""


class Mix(StrEnum):
    """How the lengths of a round differ from those that were asked for, so that the kinds of tokens can be told apart.

    No mix needs more KV cache than the lengths as given.
    """

    AS_GIVEN = "as given"
    SHORT_ANSWERS = "short answers"
    SHORT_PROMPTS = "short prompts"
    SHORT_REQUESTS = "short requests"
    REPEATED = "repeated prompts"


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: list[int]
    output_tokens: int


class Workload:
    """Draws jobs. Pairs of a trace stay together, because long prompts often have short answers."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]] | tuple[Lengths, Lengths],
        *,
        context_tokens: int | None,
        seed: int,
    ) -> None:
        """
        Args:
            lengths: pairs of prompt and output tokens, or a distribution of each.
            context_tokens: the model's `max_model_len`; None: not known.
            seed: the same one draws the same requests.
        """
        self._pairs: Sequence[tuple[int, int]] = ()
        self._prompt = self._output = Lengths()
        if len(lengths) == 2 and isinstance(lengths[0], Lengths) and isinstance(lengths[1], Lengths):
            self._prompt, self._output = lengths[0], lengths[1]
        else:
            self._pairs = [pair for pair in lengths if isinstance(pair, tuple)]
        self._longest = context_tokens or 1 << 30
        self._rng = random.Random(seed)
        self.drawn = 0
        self.cut = 0
        """Of those drawn: did not fit into the model's context and were cut."""
        self._repeated = [self._text(self._draw()[0]) for _ in range(REPEATED_PROMPTS)]

    def job(self, mix: Mix = Mix.AS_GIVEN) -> Job:
        """The next request of a round."""
        prompt_tokens, output_tokens = self._draw()
        match mix:
            case Mix.SHORT_ANSWERS:
                output_tokens = max(1, output_tokens // 4)
            case Mix.SHORT_PROMPTS:
                prompt_tokens = max(1, prompt_tokens // 4)
            case Mix.SHORT_REQUESTS:
                prompt_tokens, output_tokens = max(1, prompt_tokens // 4), max(1, output_tokens // 4)
            case Mix.REPEATED:
                return Job(self._rng.choice(self._repeated), max(1, output_tokens // 4))
            case Mix.AS_GIVEN:
                pass
        return Job(self._text(prompt_tokens), output_tokens)

    def part_of(self, whole: Job) -> Job:
        """The same with an answer cut at random: a client's first, so that clients are out of step from the start."""
        return Job(whole.prompt, 1 + int(self._rng.random() * whole.output_tokens))

    def _draw(self) -> tuple[int, int]:
        if self._pairs:
            prompt_tokens, output_tokens = self._rng.choice(self._pairs)
        else:
            prompt_tokens, output_tokens = self._prompt.draw(self._rng), self._output.draw(self._rng)
        prompt_tokens, output_tokens = max(1, prompt_tokens), max(1, output_tokens)
        fits = min(prompt_tokens, self._longest - 1)
        self.drawn += 1
        if fits + output_tokens > self._longest or fits < prompt_tokens:
            self.cut += 1
        return fits, min(output_tokens, self._longest - fits)

    def _text(self, tokens: int) -> list[int]:
        return self._rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=tokens)
