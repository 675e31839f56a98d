"""`ete run` on a model of words: where the prompt comes from, what goes to which stream, exit codes."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import edge_transformer
import edge_transformer.cpu.threads as threads_module
from cli.fake_llm import FakeLLM
from edge_transformer.cli.main import ete


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_transformer, "LLM", FakeLLM, raising=False)
    FakeLLM.made.clear()


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(ete, ["run", *arguments], input=stdin)


def test_the_answer_alone_goes_to_standard_output_and_statistics_to_standard_error() -> None:
    result = run("m", "two words")
    assert result.exit_code == 0
    assert result.stdout == "You said: two words\n"
    assert result.stderr.startswith(
        "prompt 3 tokens, 12.0 tok/s | answer 4 tokens, 1.5 tok/s | load 0.50 s | peak memory "
    )
    assert len(result.stderr.splitlines()) == 1
    assert FakeLLM.made[0].closed


@pytest.mark.parametrize("prompt", [[], ["-"]])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"from a pipe", "from a pipe"),
        (b"one line end\n", "one line end"),
        (b"one line end\r\n", "one line end"),
        (b"two line ends\n\n", "two line ends\n"),
        (b"in\r\nside", "in\r\nside"),
        (b"NUL \0 inside\n", "NUL \0 inside"),
        ("π 🙂 中".encode(), "π 🙂 中"),
        (b"\r", "\r"),
    ],
)
def test_the_prompt_comes_from_standard_input_byte_for_byte(prompt: list[str], data: bytes, text: str) -> None:
    assert run("m", *prompt, "--raw", stdin=data).exit_code == 0
    assert FakeLLM.made[0].prompts == [text]


def test_the_prompt_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("in a file\n")
    assert run("m", "--prompt-file", str(file)).stdout == "You said: in a file\n"
    assert run("m", "--prompt-file", str(tmp_path / "missing")).exit_code == 2
    endless = run("m", "--prompt-file", "/dev/zero")
    assert endless.exit_code == 2
    assert "The prompt in /dev/zero is longer than 64 MiB" in endless.stderr
    assert run("m", "both", "--prompt-file", str(file)).exit_code == 2


def test_messages_are_made_of_system_and_prompt_unless_raw() -> None:
    run("m", "hello")
    run("m", "hello", "--system", "Be brief.")
    run("plain", "hello", "--raw")
    assert [llm.prompts[0] for llm in FakeLLM.made] == [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        "hello",
    ]


def test_every_option_reaches_the_engine() -> None:
    options = (
        "--max-tokens 7 --temperature 0.5 --top-k 40 --top-p 0.9 --min-p 0.05 --repetition-penalty 1.1 "
        "--presence-penalty -0.5 --frequency-penalty 0.25 --seed 18446744073709551615 --stop A --stop BB --ignore-eos "
        "--logprobs 3 --json --threads 2 --ctx 64 --kv-dtype f32 --backend reference --offline"
    )
    assert run("m", "hello", *options.split()).exit_code == 0
    llm = FakeLLM.made[0]
    assert llm.configs == [
        edge_transformer.GenerationConfig(
            max_tokens=7,
            temperature=0.5,
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            seed=2**64 - 1,
            stop=("A", "BB"),
            logprobs=3,
            ignore_eos=True,
        )
    ]
    assert llm.context_length == 64
    del llm.settings["progress"]
    assert llm.settings == {"threads": 2, "kv_dtype": "f32", "backend": "reference", "gpu": None, "offline": True}


def test_defaults_are_those_of_the_python_interface() -> None:
    run("m", "hello")
    assert FakeLLM.made[0].configs == [edge_transformer.GenerationConfig()]


@pytest.mark.parametrize(
    "option",
    [
        "--max-tokens=0",
        "--max-tokens=x",
        "--temperature=-1",
        "--temperature=nan",
        "--temperature=inf",
        "--top-k=-1",
        "--top-p=0",
        "--top-p=1.1",
        "--min-p=2",
        "--repetition-penalty=0",
        "--presence-penalty=nan",
        "--frequency-penalty=inf",
        "--seed=-1",
        "--seed=18446744073709551616",
        "--stop=",
        "--threads=0",
        "--ctx=0",
        "--kv-dtype=f16",
        "--backend=gpu",
        "--logprobs=3",
        "--logprobs=101",
        "--no-such-flag",
    ],
)
def test_a_bad_option_is_named_and_the_model_is_not_loaded(option: str) -> None:
    result = run("m", "hello", option)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert option.split("=")[0].strip("-").replace("-", "_") in result.stderr.replace("-", "_")
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        ([], b"", "MODEL"),
        (["m", ""], b"", "empty"),
        (["m"], b"", "empty"),
        (["m", "-"], b"\n", "empty"),
        (["m"], b"abc\xff", "not UTF-8: byte 3 is 0xff"),
        (["m", "caf\udce9"], b"", "not UTF-8: byte 3 is 0xe9"),
        (["m", "hello", "--system", "\udcff"], b"", "Invalid value for '--system': this text is not UTF-8"),
        (["m", "hello", "--stop", "a\udcff"], b"", "not UTF-8: byte 1 is 0xff"),
        (["m", "hello", "--raw", "--system", "x"], b"", "--system"),
    ],
)
def test_a_bad_prompt_is_a_usage_error(arguments: list[str], stdin: bytes, words: str) -> None:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert words in result.stderr
    assert FakeLLM.made == []


def test_json_is_one_object_on_standard_output_and_nothing_else() -> None:
    result = run("m", "π 🙂", "--json", "--seed", "5", "--max-tokens", "3")
    assert result.exit_code == 0
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert answer.pop("peak_memory_bytes") > 0
    assert answer == {
        "prompt_ids": [0, 1, 2],
        "ids": [0, 1, 2],
        "text": "You said: π",
        "finish_reason": "length",
        "seed": 5,
        "timings": {
            "load_s": 0.5,
            "prefill_s": 0.25,
            "decode_s": 2.0,
            "prompt_tokens": 3,
            "generated_tokens": 3,
            "prefill_tokens_per_s": 12.0,
            "decode_tokens_per_s": 1.0,
        },
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["m", "word " * 120], 7, "121 tokens"),
        (["plain", "hello"], 6, "--raw"),
        (["broken", "hello"], 8, "layer 3"),
    ],
)
def test_errors_of_the_engine_have_their_own_exit_codes(arguments: list[str], code: int, words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert FakeLLM.made[0].closed


def test_the_help_of_the_group_has_each_commands_own_line() -> None:
    context = click.Context(ete)
    listed = CliRunner().invoke(ete, ["--help"]).output
    for name in ete.list_commands(context):
        command = ete.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert re.search(rf"^ *{name} +{re.escape(command.short_help or '')}$", listed, re.MULTILINE)
    assert CliRunner().invoke(ete, ["nonsense"]).exit_code == 2


@pytest.mark.parametrize("command", ["run", "trace"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["-5 plus 3"], "No such option '-5'. A prompt that begins with a dash comes after two dashes: MODEL -- "),
        (["what", "is", "this"], "Unexpected after the prompt: is this. A prompt of several words stands in quotes."),
        (["hello", "--max-token", "3"], "No such option '--max-token'. Did you mean"),
    ],
)
def test_a_prompt_that_a_shell_took_apart(command: str, prompt: list[str], message: str) -> None:
    result = CliRunner().invoke(ete, [command, "nowhere", *prompt])
    assert result.exit_code == 2
    assert message in result.stderr.replace("(", "")


@pytest.mark.parametrize(("threads", "noted"), [(3, True), (2, False), (None, False)])
def test_more_threads_than_processors_are_noted(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, noted: bool
) -> None:
    monkeypatch.setattr(threads_module, "usable_processors", lambda: 2)
    monkeypatch.setattr(edge_transformer, "LLM", FakeLLM)
    options = [] if threads is None else ["--threads", str(threads)]
    result = CliRunner().invoke(ete, ["run", "nowhere", "hi", *options])
    text = "--threads 3: this process may use 2 processors; more threads are slower"
    assert (text in result.stderr) == noted
