"""Commands whose last argument is a prompt: where a shell made something else of it, how to give it."""

from __future__ import annotations

import click


class PromptCommand(click.Command):
    """Says how to give a prompt that begins with a dash, or that has several words."""

    allow_extra_args = True  # refused below

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.possibilities:
                raise
            hint = 'A prompt that begins with a dash comes after two dashes: MODEL -- "-5 plus 3".'
            raise click.NoSuchOption(error.option_name, f"{error.message} {hint}", ctx=error.ctx) from error
        if rest and not ctx.resilient_parsing:
            raise click.UsageError(
                f"Unexpected after the prompt: {' '.join(rest)}. A prompt of several words stands in quotes.", ctx
            )
        return rest
