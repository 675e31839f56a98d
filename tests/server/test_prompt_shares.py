"""How prompts share the rows of a pass, by hand."""

from edge_transformer.engine.prompt_shares import Reading, share_budget


def test_pieces_end_on_borders_or_with_the_prompt() -> None:
    assert Reading(0, 1000).piece(100) == 64
    assert Reading(64, 1000).piece(128) == 128
    assert Reading(70, 1000).piece(100) == 58  # to 128
    assert Reading(960, 1000).piece(64) == 40


def test_the_oldest_gets_half_and_the_shortest_the_rest() -> None:
    long, other, short = Reading(0, 5000), Reading(0, 3000), Reading(10, 50)
    assert share_budget([long], 256) == [(0, 256)]
    assert share_budget([long, other, short], 256) == [(0, 128), (2, 40), (1, 64)]
    assert share_budget([long, other], 128) == [(0, 64), (1, 64)]
    assert share_budget([long, other], 64) == [(0, 64)]
    assert share_budget([long, other], 63) == share_budget([], 256) == []
