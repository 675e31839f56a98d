"""`ete chat` on a model of words: turns, commands, and a context that fills up."""

import pytest
from click.testing import CliRunner, Result

import edge_transformer
from cli.fake_llm import FakeLLM
from edge_transformer.cli import turn_input
from edge_transformer.cli.conversation import Conversation
from edge_transformer.cli.main import ete
from edge_transformer.errors import ContextLengthError


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_transformer, "LLM", FakeLLM, raising=False)
    FakeLLM.made.clear()


def chat(lines: str | bytes, *arguments: str, model: str = "m") -> Result:
    return CliRunner().invoke(ete, ["chat", model, *arguments], input=lines)


def roles_and_texts(prompt: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt]


def test_each_line_is_a_turn_and_the_whole_conversation_is_the_prompt() -> None:
    result = chat("one\n\n   \ntwo\r\nthree", "--system", "Be brief.", "--max-tokens", "20")
    assert result.exit_code == 0
    assert result.stdout == "You said: one\nYou said: two\nYou said: three\n"
    assert result.stderr == ""
    llm = FakeLLM.made[0]
    assert roles_and_texts(llm.prompts[-1]) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "You said: one"),
        ("user", "two"),
        ("assistant", "You said: two"),
        ("user", "three"),
    ]
    assert llm.closed


def test_slash_commands() -> None:
    result = chat(
        "one\n/system Be kind.\ntwo\n/drop\nthree\n/reset\n/drop\n/system\nfour\n /exit\n/nonsense\n/exit\nfive\n"
    )
    assert result.exit_code == 0
    assert [roles_and_texts(prompt) for prompt in FakeLLM.made[0].prompts] == [
        [("user", "one")],
        [("system", "Be kind."), ("user", "one"), ("assistant", "You said: one"), ("user", "two")],
        [("system", "Be kind."), ("user", "two"), ("assistant", "You said: two"), ("user", "three")],
        [("user", "four")],
        [("user", "four"), ("assistant", "You said: four"), ("user", " /exit")],
    ]
    assert "no turn to forget" in result.stderr
    assert "no command /nonsense" in result.stderr
    assert "/reset" in chat("/help\n").stderr


def test_a_turn_that_no_longer_fits_is_refused_after_it_was_said_that_room_gets_short() -> None:
    # A turn of two words takes 1 + 2 tokens, its answer 1 + 4.
    result = chat("a b\n" * 10, "--ctx", "50", "--max-tokens", "32")
    assert result.exit_code == 7
    answers = result.stdout.splitlines()
    # Prompt of turn n: 8 (n - 1) + 3 tokens; the last one that leaves 16 of 50 is n = 4.
    assert len(answers) == 4
    assert all(line == "You said: a b" for line in answers)
    assert result.stderr.splitlines() == [
        "(the context has room for 31 more tokens: a longer answer is cut off there)",
        "(the context has room for 23 more tokens: a longer answer is cut off there)",
        "Error: the conversation has 35 tokens with this turn, and the context holds 50: 15 tokens are too few for an "
        "answer. Shorten the turn, /drop the oldest turn, /reset, or start with a longer --ctx",
    ]


def test_old_turns_are_dropped_only_when_asked_and_it_is_said() -> None:
    result = chat("a b\n" * 10, "--ctx", "50", "--max-tokens", "16", "--when-full", "drop")
    assert result.exit_code == 0
    assert result.stdout.count("You said: a b\n") == 10
    assert result.stderr.splitlines()[0] == "(the context is full: dropped the oldest turn)"
    lengths = [len(prompt) for prompt in FakeLLM.made[0].prompts]
    assert lengths == [1, 3, 5, 7, 7, 7, 7, 7, 7, 7]
    # Even without any older turn this one does not fit.
    assert chat("word " * 60, "--ctx", "50", "--when-full", "drop").exit_code == 7


def test_a_refused_turn_changes_nothing() -> None:
    llm = FakeLLM("m", context_length=50)
    conversation = Conversation(llm, max_tokens=32)  # type: ignore[arg-type]
    messages, room, dropped = conversation.open_turn("a b")
    assert (len(messages), room, dropped) == (1, 47, 0)
    conversation.turns = [("a b", "c d")] * 4
    before = list(conversation.turns)
    for drop_oldest in (False, True):
        conversation.drop_oldest = drop_oldest
        with pytest.raises(ContextLengthError):
            conversation.open_turn("word " * 48)
        assert conversation.turns == before


def test_few_tokens_asked_for_need_little_room() -> None:
    llm = FakeLLM("m", context_length=50)
    conversation = Conversation(llm, max_tokens=3)  # type: ignore[arg-type]
    assert conversation.open_turn("word " * 46)[1] == 3
    with pytest.raises(ContextLengthError):
        conversation.open_turn("word " * 47)


def test_a_model_without_a_chat_template_is_refused_with_what_to_do() -> None:
    result = chat("one\n", model="plain")
    assert result.exit_code == 6
    assert "ete run --raw" in result.stderr
    assert FakeLLM.made[0].closed


def test_a_line_that_is_no_utf8_is_refused() -> None:
    result = chat(b"one\ntw\xffo\n")
    assert result.exit_code == 2
    assert "line 2 of standard input is not UTF-8: byte 2 is 0xff" in result.stderr


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_input, "MAX_BYTES", 1 << 20)
    result = chat("one\n" + "x" * (1 << 20) + "\ntwo\n")
    assert result.exit_code == 2
    assert result.stdout == "You said: one\n"
    assert "line 2 of standard input is longer than 1 MiB" in result.stderr
