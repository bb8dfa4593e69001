"""Accept, correct, commit: how far a row's drafts go, by coupled or by rejection sampling.

Both leave the committed tokens distributed as the model's own sampling would have them, at any
temperature, filter and penalty. Coupled draws drafts and choices with the same noise, so the
tokens are the very ones plain decoding commits. Rejection (Leviathan et al. 2023; Chen et al.
2023) accepts more drafts at high temperatures and commits other tokens of the same distribution.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..runtime import noise
from ..runtime.context import Sampling, TokenLogprob
from ..runtime.errors import RowError
from ..runtime.exits import Ids
from . import sampler
from .base import Row
from .sampler import Logits
from .tree import Tree


class Spread(msgspec.Struct, frozen=True):
    """A distribution over some tokens, as it was drawn from; every other token has none.

    Args:
        tokens: Token ids.
        shares: Their probabilities, float64, adding up to 1.
    """

    tokens: Ids
    shares: NDArray[np.float64]


class Draft(msgspec.Struct, frozen=True):
    """One drafted token and, where acceptance needs it, what it was drawn from.

    Args:
        failed: Whether drafting raised an error; the token means nothing then.
    """

    token: int
    spread: Spread | None = None
    failed: bool = False


class Verdict(msgspec.Struct):
    """What a row committed in a step.

    Args:
        accepted: Drafts the model chose as well, from the first on.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob]
    accepted: int = 0


Choice = tuple[int, TokenLogprob | None]  # a token and, where asked for, its log probability


class Acceptance(Protocol):
    """One way to draft and to accept; it holds no state."""

    name: str

    def draft(self, logits: Logits, row: Row, before: Sequence[Draft], ids: Ids | None) -> Draft:
        """Draft the token that follows `before`.

        Args:
            logits: The head's, of the tokens `ids`.

        Raises:
            RowError: When they are not finite where it matters.
        """
        ...

    def verify(self, logits: Logits, row: Row, drafts: Sequence[Draft]) -> Verdict:
        """Commit what the model makes of the drafts, and one token of its own behind them.

        Args:
            logits: The model's, [len(drafts) + 1, vocabulary]: each position given all drafts
                before it.

        Raises:
            RowError: When the first position's are not finite where it matters; those that fail
                behind others end the verdict.
        """
        ...


class Coupled:
    """Accept a draft when the model, with the same noise, chooses the same token."""

    name = "coupled"

    def draft(self, logits: Logits, row: Row, before: Sequence[Draft], ids: Ids | None) -> Draft:
        """Choose as the model will, from the head's logits; see `Acceptance.draft`."""
        sampling = row.context.sampling
        key = noise.stream_key(row.context.seed, row.position + len(before))
        foreseen = _foreseen(logits, row, _tokens(before), ids)
        return Draft(sampler.pick(foreseen.logits, sampling, key, foreseen.ids))

    def candidates(
        self, logits: Logits, row: Row, before: Sequence[int], ids: Ids | None, count: int
    ) -> tuple[list[int], NDArray[np.float64]]:
        """Return the tokens that the model will choose most likely, given the drafts `before`.

        Returns:
            Up to `count` tokens, the one that `draft` gives first, and their perturbed scores in
            units of logits.
        """
        sampling = row.context.sampling
        key = noise.stream_key(row.context.seed, row.position + len(before))
        foreseen = _foreseen(logits, row, before, ids)
        return sampler.best(foreseen.logits, sampling, key, foreseen.ids, count)

    def verify(self, logits: Logits, row: Row, drafts: Sequence[Draft]) -> Verdict:
        """Choose position by position, as plain decoding does; see `Acceptance.verify`."""
        return follow(row, (sampler.choose(each, row) for each in logits), drafts)


class Rejection:
    """Accept a draft with probability min(1, p/q), else draw from the residual (p - q)+."""

    name = "rejection"

    def draft(self, logits: Logits, row: Row, before: Sequence[Draft], ids: Ids | None) -> Draft:
        """Draw from the head's own distribution, filtered as the row asks."""
        sampling = row.context.sampling
        foreseen = _foreseen(logits, row, _tokens(before), ids)
        key = noise.stream_key(row.context.seed, row.position + len(before), noise.DRAFT)
        token = sampler.pick(foreseen.logits, sampling, key, foreseen.ids)
        return Draft(token, spread(foreseen.logits, sampling, foreseen.ids))

    def verify(self, logits: Logits, row: Row, drafts: Sequence[Draft]) -> Verdict:
        """Test the drafts in order; see `Acceptance.verify`."""
        return follow(row, self._choices(logits, row, drafts), drafts)

    def _choices(self, logits: Logits, row: Row, drafts: Sequence[Draft]) -> Iterator[Choice]:
        """Decide on each draft, then choose freely; the row has committed what came before."""
        for at, draft in enumerate(drafts):
            token = self._decide(logits[at], row, draft)
            yield token, sampler.report(logits[at], token, row.context.sampling)
        yield sampler.choose(logits[len(drafts)], row)

    def _decide(self, logits: Logits, row: Row, draft: Draft) -> int:
        """Return the draft, or the token that takes its place."""
        if row.near_end:  # what a form refuses is known only once it is chosen
            return sampler.choose(logits, row)[0]
        context = row.context
        mine, ids = sampler.prepared(logits, row)
        target = spread(mine, context.sampling, ids)
        drafted = draft.spread
        assert drafted is not None
        chance = noise.uniform(noise.stream_key(context.seed, row.position, noise.ACCEPT))
        if chance * _share(drafted, draft.token) < _share(target, draft.token):
            return draft.token
        every = np.zeros(logits.shape[0])
        every[drafted.tokens] = drafted.shares
        residual = np.maximum(target.shares - every[target.tokens], 0)
        key = noise.stream_key(context.seed, row.position, noise.RESIDUAL)
        bits = noise.token_bits(key, target.tokens.astype(np.uint32))
        with np.errstate(divide="ignore"):
            scores = np.log(residual) + noise.gumbel(bits)
        return int(target.tokens[np.argmax(scores)])


def follow(row: Row, choices: Iterable[Choice], drafts: Sequence[Draft]) -> Verdict:
    """Commit choices up to the first that is not what was drafted, or that ends the row.

    Args:
        choices: One a draft and one more. Each is asked for once those before it are committed.
    """
    left = iter(drafts)

    def drafted(token: int) -> bool:
        draft = next(left, None)
        return draft is not None and draft.token == token

    return _walk(row, choices, drafted)


def follow_tree(row: Row, logits: Logits, tree: Tree) -> tuple[Verdict, list[int]]:
    """Commit what the model chooses from node to node of a tree, as plain decoding would.

    Args:
        logits: The model's, of every node, [nodes, vocabulary].

    Returns:
        The verdict, and the nodes whose keys and values the row keeps: one a committed token.

    Raises:
        RowError: When the root's logits are not finite where it matters.
    """
    way = [0]

    def drafted(token: int) -> bool:
        node = tree.child(way[-1], token)
        if node is not None:
            way.append(node)
        return node is not None

    verdict = _walk(row, (sampler.choose(logits[way[-1]], row) for _ in count()), drafted)
    return verdict, way[: len(verdict.tokens)]


def _walk(row: Row, choices: Iterable[Choice], drafted: Callable[[int], bool]) -> Verdict:
    """Commit choices one by one, as long as each was drafted and does not end the row.

    A choice that fails behind others ends the step before it: what is committed counts, and the
    next step begins with the choice that failed, as plain decoding would.
    """
    verdict = Verdict([], [])
    try:
        for token, report in choices:
            row.commit(token)
            verdict.tokens.append(token)
            if report is not None:
                verdict.logprobs.append(report)
            if not drafted(token):
                break
            verdict.accepted += 1
            if token in row.context.end_ids:
                break
    except Exception:
        if not verdict.tokens:
            raise
    return verdict


ACCEPTANCE: Final[Mapping[str, Acceptance]] = {a.name: a for a in (Coupled(), Rejection())}


def spread(logits: Logits, sampling: Sampling, ids: Ids | None) -> Spread:
    """Return the distribution that adjusted logits are sampled from.

    Args:
        ids: The tokens the logits are of; None for the whole vocabulary.
    """
    if sampling.temperature == 0:
        at = np.array([logits.argmax()])
    elif sampling.filtered:
        at = sampler.filter_tokens(logits, sampling)
    else:
        at = np.arange(logits.shape[0])
    temperature = sampling.temperature or 1.0
    scaled = logits[at].astype(np.float64) / temperature
    if not np.isfinite(scaled.max()):  # a temperature so low that the quotient overflows
        scaled = (logits[at].astype(np.float64) - float(logits.max())) / temperature
    weights = np.exp(scaled - scaled.max())
    return Spread(at if ids is None else ids[at], weights / weights.sum())


class Foreseen(NamedTuple):
    """A head's logits as the model's will be, and the tokens they are of; None for all."""

    logits: Logits
    ids: Ids | None


def _foreseen(logits: Logits, row: Row, before: Sequence[int], ids: Ids | None) -> Foreseen:
    """Adjust a head's logits as the model's will be: penalties and grammar count the drafts.

    Raises:
        RowError: When they are not finite where it matters.
    """
    sampling = row.context.sampling
    counts: Mapping[int, int] = row.counts
    if before and sampling.penalised:
        counts = Counter(row.counts) + Counter(before)
    with suppress(RowError):  # a draft may go wrong; the choice it is made for will say so
        if (allowed := row.allowed(before)) is not None:
            logits, ids = _common(logits, ids, allowed)
    adjusted = row.adjuster.apply(logits, counts, ids)
    return Foreseen(sampler.finite(adjusted), ids)


def _common(logits: Logits, ids: Ids | None, allowed: Ids) -> tuple[Logits, Ids | None]:
    """Keep the tokens a grammar allows; what the head never drafts is as likely as the rest of it.

    Where none is allowed, behind an end or a broken draft, all stays: it is refused anyway.
    """
    if not allowed.size:
        return logits, ids
    if ids is None:
        return logits[allowed], allowed
    kept = np.flatnonzero(np.isin(ids, allowed, assume_unique=True))
    if not kept.size:
        return np.zeros(allowed.size, np.float32), allowed
    return logits[kept], ids[kept]


def _tokens(drafts: Sequence[Draft]) -> list[int]:
    return [draft.token for draft in drafts]


def _share(of: Spread, token: int) -> float:
    at = np.flatnonzero(of.tokens == token)
    return float(of.shares[at[0]]) if at.size else 0.0
