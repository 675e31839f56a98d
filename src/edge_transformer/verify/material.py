"""What the model is given to read, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

from edge_transformer.errors import TextError, UsageError
from edge_transformer.models.config import GATED_DELTA, ModelSpec
from edge_transformer.text.tokenizer import Tokenizer
from edge_transformer.verify.feed import Prompt

TEXT = """\
The lighthouse stood where the river met the sea, and for ninety years its keeper had written down the weather. "Wind \
from the west, 6 knots; rain until noon," says the first page. On 14 March 1931 there is only a drawing of a whale.

def tide(hour, height=2.75):
    return [round(height * math.sin(math.pi * (hour - h) / 6.21), 3) for h in range(24)]

In summer the ferry brought visitors: 3 adults and 11 children in one boat, €4.50 each. 灯塔的灯每十二秒闪一次。 Маяк \
был виден за двадцать миль. What does a keeper do when the fog does not lift for a week? He counts the bells, answers \
letters, mends the nets of people who will never pay him, and learns the names of the birds, some of them in no book.
| month | ships | lost |
|-------|------:|-----:|
| May   |   118 |    0 |
| June  |   131 |    2 |
The second keeper was an engineer. She replaced the clockwork by a motor, measured the current (0.8 A at 230 V), and \
found that the lamp had been turning 0.4 % too slowly since it was built; nobody had noticed, because every captain on \
that coast had learned the wrong rhythm from the one before. She left it so, and wrote: "Right is what they expect."
"""

QUICK_WORK = 80_000_000_000
"""Parameters times tokens of a run of --quick."""

QUICK_TOKENS, TOKENS = (130, 560), 1100
"""Of the long prompt: at least and at most with --quick, and without. More than 512 are more than one KV tile."""

QUICK_ORACLE_PARAMETERS = 150_000_000
"""Parameters of the layers that numpy computes with --quick."""


@dataclass(frozen=True, slots=True)
class Material:
    """long: the prompt of links that compare bits, and some of its tokens decoded. mates: prompts that share passes
    with it. short: the prompt of links that are slow. oracle_layers: how many of the first layers numpy computes.
    chunks: sizes of prompt chunks that must not change a bit.
    """

    long: Prompt
    mates: tuple[Prompt, ...]
    short: Prompt
    oracle_layers: int
    chunks: tuple[int, ...]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.long, *self.mates)


def material(tokenizer: Tokenizer, spec: ModelSpec, parameters: int, quick: bool) -> Material:
    """The built-in text in the model's tokens, over and over, as long as `quick` and the context allow.

    Raises TextError when the text has no tokens in the model's vocabulary, UsageError for a context of one token.
    """
    ids = tokenizer.encode(TEXT)
    if not ids or max(ids) >= spec.config.vocab_size:
        highest = f"up to {max(ids)}" if ids else "(none)"
        raise TextError(
            f"of the text that is verified the tokenizer makes tokens {highest}; the model has 0 to "
            f"{spec.config.vocab_size - 1}: the tokenizer is that of another model"
        )
    if spec.config.context_length < 2:
        raise UsageError("the model's context holds 1 token; verifying takes a prompt and a token after it: 2 at least")
    length = TOKENS
    if quick:
        least, most = QUICK_TOKENS
        length = max(least, min(most, QUICK_WORK // max(parameters, 1)))
    length = min(length, spec.config.context_length)
    short = min(48 if quick else 150, length)
    return Material(
        long=_prompt(ids, 0, length, 9),
        mates=(_prompt(ids, 40, min(90, length), 5), _prompt(ids, 77, min(37, length), 11)),
        short=_prompt(ids, 0, short, short // 3),
        oracle_layers=_oracle_layers(spec) if quick else spec.config.num_layers,
        # Recurrent state is computed in pieces that end on multiples of 64 positions: other sizes agree to rounding.
        chunks=(64, 128) if quick or GATED_DELTA in spec.config.layer_kinds else (37, 64, 128),
    )


def _prompt(ids: list[int], start: int, length: int, decoded: int) -> Prompt:
    tokens = [ids[(start + index) % len(ids)] for index in range(length)]
    return Prompt(tokens, min(decoded, length - 1))


def _oracle_layers(spec: ModelSpec) -> int:
    """As many as are quick, and one of each kind at least."""
    parameters = 0
    for count, layer in enumerate(spec.layers):
        parameters += sum(m.shape[0] * m.shape[1] for segment in layer.segments for m in segment.matrices)
        if parameters > QUICK_ORACLE_PARAMETERS:
            return max(layers_of_each_kind(spec), count)
    return len(spec.layers)


def layers_of_each_kind(spec: ModelSpec) -> int:
    """How many of the first layers have one of every kind and window among them."""
    kinds = list(zip(spec.config.layer_kinds, spec.config.layer_windows, spec.config.layer_ropes, strict=True))
    return 1 + max(kinds.index(kind) for kind in set(kinds))
