"""What one row owns from the moment it is asked for: prompt, sampling, seed and budget."""

from typing import Final

import msgspec

from .grammar import Grammar

SEED_MASK: Final = (1 << 64) - 1


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen; the neutral value of each field changes nothing.

    Filters apply in the order temperature, top_k, top_p, min_p, each to what the one before
    left. Repetition follows Keskar et al. 2019 (CTRL) over prompt and answer; presence and
    frequency follow OpenAI's definition over the answer alone.

    Args:
        temperature: 0 takes the most likely token.
        top_k: 0 is off.
        top_p: 1 is off (Holtzman et al. 2020).
        min_p: 0 is off; relative to the most likely token.
        logit_bias: (token id, added to its logit) pairs.
        logprobs: None for none, else how many alternatives to report beside each token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def filtered(self) -> bool:
        """Whether some tokens can never be chosen."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class RowContext(msgspec.Struct, frozen=True):
    """Everything a lane and the scheduler need to know of one row.

    Args:
        prompt: Token ids, at least one.
        seed: Names the row's random stream (64 bits).
        budget: The most tokens to generate, at least 1.
        end_ids: Tokens that end the answer; empty when the caller asked to ignore them.
        score_prompt: Report logprobs of the prompt's own tokens (`echo` with `logprobs`).
        grammar: What form the answer must have.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    budget: int
    end_ids: frozenset[int]
    score_prompt: bool = False
    grammar: Grammar | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """The log probability of one token under the model's own distribution, before any filter.

    Args:
        token: The token id.
        logprob: Natural logarithm; None for the first token of a prompt, which nothing precedes.
        top: The most likely alternatives as (token id, logprob), best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def row_seed(seed: int, index: int) -> int:
    """Give choice `index` of a request its own stream; the first keeps the seed as it was sent."""
    return (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK
