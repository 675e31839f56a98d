"""From logits to a token: penalties, temperature, truncation, and a counter-based draw.

The order is: logit bias and penalties, temperature, top-k, top-p, min-p, draw. Randomness is a function of
(seed, position) only, so that a sequence's text does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edge_transformer.errors import UsageError

FloatArray = npt.NDArray[np.float32]

SMALLEST_SETTING, LARGEST_SETTING = 1e-30, 1e30
"""Bounds of the settings that change logits: within them no logit overflows float32, whatever they are together."""


REACH = 12.0
"""A draw is looked for first among tokens at least exp(-REACH) times as likely as the likeliest."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How a text is generated. Raises UsageError when a value is out of its range.

    max_tokens: at most this many new tokens (None: until an end token or the end of the context).
    temperature: 0 takes the likeliest token. top_k, top_p, min_p: 0, 1 and 0 switch them off.
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or answer (Keskar et
    al. 2019); presence_penalty and frequency_penalty: subtracted once, respectively per occurrence, for tokens of the
    answer.
    logit_bias: added per token id. seed: None draws one and reports it. stop: strings that end the text (not included).
    logprobs: report log-probabilities of the chosen token and this many alternatives. ignore_eos: end tokens do not
    end.
    """

    max_tokens: int | None = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _check_number("temperature", self.temperature, 0, LARGEST_SETTING)
        _check_integer("top_k", self.top_k, 0, None)
        _check_number("top_p", self.top_p, SMALLEST_SETTING, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, SMALLEST_SETTING, LARGEST_SETTING)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -LARGEST_SETTING, LARGEST_SETTING)
        _check_integer("seed", self.seed, 0, 2**64 - 1, optional=True)
        strings = not isinstance(self.stop, str | bytes) and all(isinstance(stop, str) and stop for stop in self.stop)
        _check("stop", self.stop, strings, 'a tuple of strings, none empty, such as ("END",)')
        _check_integer("logprobs", self.logprobs, 0, 100, optional=True)
        _check("logit_bias", self.logit_bias, isinstance(self.logit_bias, Mapping), "a mapping from token to number")
        for token, bias in self.logit_bias.items():
            _check_integer("a token of logit_bias", token, 0, None)
            if bias != -math.inf:
                _check_number(f"logit_bias[{token}]", bias, -LARGEST_SETTING, LARGEST_SETTING, " or minus infinity")

    @property
    def plain_greedy(self) -> bool:
        """Whether the likeliest token of the unchanged logits is taken."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        return bool(
            self.logit_bias or self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's own distribution (before penalties and temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def sample(
    logits: FloatArray, config: GenerationConfig, seed: int, prompt: Sequence[int], answer: Sequence[int]
) -> int:
    """The next token id for logits f32 [V]. The draw is a function of (seed, len(prompt) + len(answer)) and the
    logits.
    """
    if config.plain_greedy:
        return int(logits.argmax())
    if config.changes_logits:
        logits = adjust_logits(logits, config, prompt, answer)
        if logits.max() == -math.inf:
            raise UsageError("logit_bias bans every token; leave at least one that can be taken")
    if config.temperature == 0:
        return int(logits.argmax())
    return _draw(logits, config, uniform(seed, len(prompt) + len(answer)))


def _draw(logits: FloatArray, config: GenerationConfig, point: float) -> int:
    """The candidate at `point`, 0 to 1, of the candidates' probabilities laid end to end, the likeliest first.

    Nearly always it is among the likely ones: only those are sorted, and all of them where it is not.
    """
    for reach in (REACH, math.inf) if config.temperature > SMALLEST_SETTING else (math.inf,):
        tokens, probabilities, complete = _candidates(logits, config, reach)
        cumulative = np.cumsum(probabilities)
        target = point * cumulative[-1] if complete else point
        if complete or (target < cumulative[-1] and config.top_p == 1 and config.min_p == 0):
            break
    return int(tokens[min(int(np.searchsorted(cumulative, target, side="right")), len(tokens) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only (Philox 4x64, Salmon et al. 2011)."""
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, position, 0], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return float(generator.random())


def adjust_logits(
    logits: FloatArray, config: GenerationConfig, prompt: Sequence[int], answer: Sequence[int]
) -> FloatArray:
    """Logits f32 [V] after penalties and bias; the input is left as it is."""
    logits = logits.copy()
    if config.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *answer], np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / config.repetition_penalty, values * config.repetition_penalty)
    if answer and (config.presence_penalty != 0 or config.frequency_penalty != 0):
        tokens, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        logits[tokens] -= np.float32(config.presence_penalty) + np.float32(config.frequency_penalty) * counts.astype(
            np.float32
        )
    for token, bias in config.logit_bias.items():
        if not 0 <= token < len(logits):
            raise UsageError(f"logit_bias names token {token}; this model's tokens are 0 to {len(logits) - 1}")
        logits[token] += np.float32(bias)
    return logits


def truncated_distribution(
    logits: FloatArray, config: GenerationConfig
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Candidates after top-k, top-p and min-p: token ids, likeliest first (ties: lower id first), and probabilities
    f64.

    The probabilities are those of the softmax over the top-k; they do not sum to 1 after top-p or min-p.
    """
    tokens, probabilities, _ = _candidates(logits, config, math.inf)
    return tokens, probabilities


def _candidates(
    logits: FloatArray, config: GenerationConfig, reach: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], bool]:
    """What `truncated_distribution` gives, or its beginning: the tokens at least exp(-reach) times as likely as the
    likeliest; and whether that is all of it.
    """
    peak = float(logits.max())
    # Differences to the peak: a temperature near 0 then overflows to minus infinity only, which has probability 0.
    with np.errstate(over="ignore"):
        least = np.float32(peak - reach * config.temperature)
        tokens = np.flatnonzero(logits >= least) if reach < math.inf else np.arange(len(logits))
        if config.top_k > 0:
            tokens = _largest(logits, tokens if len(tokens) >= config.top_k else np.arange(len(logits)), config.top_k)
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
        if config.top_k > 0:
            tokens = tokens[: config.top_k]
        weights = np.exp((logits[tokens].astype(np.float64) - peak) / config.temperature)
        total = weights.sum()
        if config.top_k == 0 and len(tokens) < len(logits):
            every = np.exp((logits - np.float32(peak)) / np.float32(config.temperature))
            total += every.sum(dtype=np.float64) - every[tokens].sum(dtype=np.float64)  # a small rest: float32 will do
    probabilities = weights / total
    keep = len(tokens)
    if config.top_p < 1:
        # The smallest set whose probability reaches top_p: every token before which less than top_p has been gathered.
        before = np.cumsum(probabilities) - probabilities
        keep = int(np.count_nonzero(before < config.top_p))
    if config.min_p > 0:
        keep = min(keep, int(np.count_nonzero(probabilities >= config.min_p * probabilities[0])))
    complete = keep < len(tokens) or len(tokens) == len(logits) or config.top_k > 0
    keep = max(keep, 1)
    return tokens[:keep], probabilities[:keep], complete


def _largest(logits: FloatArray, tokens: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Of `tokens` those with the `count` largest logits, and those equal to the last of these."""
    if len(tokens) <= count:
        return tokens
    values = logits[tokens]
    threshold = np.partition(values, -count)[-count]
    return np.extract(values >= threshold, tokens)


def token_logprobs(logits: FloatArray, token: int, alternatives: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `alternatives` likeliest tokens for logits f32 [V]."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    normalizer = float(peak + np.log(np.exp(wide - peak).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        likeliest = np.argsort(-wide, kind="stable")[:alternatives]
        top = tuple((int(index), float(wide[index]) - normalizer) for index in likeliest)
    return TokenLogprobs(token, float(wide[token]) - normalizer, top)


def _check_integer(name: str, value: object, least: int, most: int | None, *, optional: bool = False) -> None:
    valid = isinstance(value, int | np.integer) and bool(least <= value and (most is None or value <= most))
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    _check(name, value, valid or (optional and value is None), f"a whole number, {limits}{', or None' * optional}")


def _check_number(name: str, value: object, least: float, most: float, more: str = "") -> None:
    valid = isinstance(value, int | float | np.integer | np.floating) and bool(least <= value <= most)
    _check(name, value, valid, f"a number, {least:g} to {most:g}{more}")


def _check(name: str, value: object, valid: bool, allowed: str) -> None:
    if not valid:
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}")
