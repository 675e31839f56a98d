"""`ete chat`: a conversation, with slash commands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from edge_transformer.cli.answer import write_answer
from edge_transformer.cli.console import note, progress_bar
from edge_transformer.cli.conversation import Conversation
from edge_transformer.cli.expectation import expectation
from edge_transformer.cli.ledger import ledger_of
from edge_transformer.cli.main import INTERRUPTED
from edge_transformer.cli.options import (
    PromptText,
    engine_options,
    generation_config,
    generation_options,
    load_model,
)
from edge_transformer.cli.turn_input import piped_turns, typed_turns
from edge_transformer.errors import ContextLengthError, TextError

if TYPE_CHECKING:
    from edge_transformer import Generation, GenerationConfig

HELP = """\
/help           this list
/reset          forget all turns and start afresh
/drop           forget the oldest turn
/system TEXT    set the system message (without TEXT: remove it)
/exit           leave, as Ctrl-D does
Alt-Enter starts a new line in a turn; Ctrl-C stops an answer. A turn that begins with a blank is never a command."""


@click.command("chat", short_help="Talk with a model, turn by turn.")
@click.argument("model")
@click.option("--system", metavar="TEXT", type=PromptText(), help="System message of the chat.")
@click.option(
    "--when-full",
    type=click.Choice(["refuse", "drop"]),
    default="refuse",
    show_default=True,
    help="When a turn no longer fits in the context: refuse it, or drop the oldest turns.",
)
@generation_options
@engine_options
@click.pass_context
def command(context: click.Context, /, model: str, system: str | None, when_full: str, **options: Any) -> None:
    """Talk with MODEL (a folder, a .gguf file, a hub id, or `demo`).

    Ctrl-C stops the answer and keeps what there is of it; Ctrl-D leaves; /help lists the commands. When standard input
    is not a terminal, each of its lines is a turn, and the first turn that does not fit ends the program (exit code 7).

    The whole conversation is in the context, and nothing is forgotten silently. As soon as an answer might be cut off
    by the end of the context, you are told so. A turn that no longer fits is refused (/drop and /reset make room), or
    with --when-full drop the oldest turns are forgotten and it is said how many.
    """
    config = generation_config(options)
    with progress_bar() as progress:
        llm = load_model(model, options, progress)
    with llm:
        if llm.chat_template is None:
            raise TextError(
                f"{model} has no chat template, so it cannot chat; `ete run --raw` continues plain text with it"
            )
        if (placed := ledger_of(llm)) is not None:
            note(placed)
        if (expected := expectation(llm)) is not None:
            note(expected)
        conversation = Conversation(llm, options["max_tokens"], system, drop_oldest=when_full == "drop")
        if sys.stdin.isatty():
            _chat(conversation, config, model)
        elif not _answer_lines(conversation, config):
            context.exit(INTERRUPTED)


def _chat(conversation: Conversation, config: GenerationConfig, model: str) -> None:
    """The loop at a terminal: what goes wrong with a turn is said, and the conversation goes on."""
    full = "the oldest turns are dropped" if conversation.drop_oldest else "a turn is refused (/drop, /reset make room)"
    note(f"{model}: context {conversation.llm.context_length} tokens. /help lists the commands, Ctrl-D leaves.")
    note(f"When the context is full, {full}; you are told before it comes to that.")
    for text in typed_turns():
        if text.startswith("/"):
            if not _obey(conversation, text):
                return
        elif text.strip():
            try:
                generation = _answer(conversation, config, text)
            except (ContextLengthError, TextError) as error:
                note(f"Error: {error}")
                continue
            _say_after(conversation, generation)


def _answer_lines(conversation: Conversation, config: GenerationConfig) -> bool:
    """The loop without a terminal; False when it was interrupted."""
    for text in piped_turns():
        if text.startswith("/"):
            if not _obey(conversation, text):
                return True
        elif text.strip() and _answer(conversation, config, text).finish_reason == "interrupted":
            return False
    return True


def _answer(conversation: Conversation, config: GenerationConfig, text: str) -> Generation:
    """One turn: the answer goes to standard output as it is made."""
    messages, room, dropped = conversation.open_turn(text)
    if dropped:
        note(f"(the context is full: dropped the oldest {'turn' if dropped == 1 else f'{dropped} turns'})")
    if room < conversation.max_tokens:
        note(f"(the context has room for {room} more tokens: a longer answer is cut off there)")
    generation = write_answer(conversation.llm, messages, config)
    conversation.close_turn(text, generation)
    return generation


def _say_after(conversation: Conversation, generation: Generation) -> None:
    ends = {
        "interrupted": "stopped",
        "length": f"cut off at --max-tokens {conversation.max_tokens}",
        "context": "cut off: the context is full",
    }
    end = ends.get(generation.finish_reason)
    rate = generation.timings.decode_tokens_per_s
    used = f"context {conversation.used_tokens} of {conversation.llm.context_length} tokens"
    note(f"({f'{end}; ' if end else ''}{len(generation.ids)} tokens, {rate:.1f} tok/s; {used})")
    if conversation.nearly_full():
        coming = "old turns will be dropped" if conversation.drop_oldest else "/drop or /reset make room"
        note(f"(the context is nearly full: the next answer may not fit; {coming})")


def _obey(conversation: Conversation, line: str) -> bool:
    """Carry out a slash command; False when it says to leave."""
    name, _, argument = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.reset()
        note("(all turns forgotten)")
    elif name == "/drop":
        note("(the oldest turn is forgotten)" if conversation.drop() else "(there is no turn to forget)")
    elif name == "/system":
        conversation.system = argument.strip() or None
        note("(system message set)" if conversation.system else "(no system message)")
    elif name == "/help":
        note(HELP)
    else:
        note(f"(no command {name}; /help lists them; begin with a blank to send such a text)")
    return True
