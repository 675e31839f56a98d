"""The command line on the demo model, as a process."""

import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from edge_transformer import LLM
from paths import REPOSITORY, smollm2_path

ETE = [sys.executable, "-c", "from edge_transformer.cli.main import main; main()"]

pytestmark = pytest.mark.real_model


def run(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*ETE, *arguments], input=stdin, capture_output=True, text=True)


def golden_case(name: str) -> dict[str, Any]:
    golden = json.loads((REPOSITORY / "tests" / "golden" / "smollm2_hf_fp32.json").read_text(encoding="utf-8"))
    case: dict[str, Any]
    for case in golden["cases"]:
        if case["name"] == name:
            return case
    raise KeyError(name)


def test_a_raw_prompt_gives_the_reference_ids_in_json() -> None:
    case = golden_case("english")
    arguments = ["--raw", "--json", "--kv-dtype", "f32", "--max-tokens", "16", "--ignore-eos"]
    done = run("run", str(smollm2_path()), "-", *arguments, stdin=case["prompt"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt_ids"] == case["prompt_ids"]
    assert answer["ids"] == case["greedy_ids"][:16]
    assert answer["finish_reason"] == "length"


def test_a_question_is_answered_on_standard_output() -> None:
    done = run("run", str(smollm2_path()), "What is the capital of France?")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert done.stderr.startswith("prompt 37 tokens")


def test_a_prompt_longer_than_the_context_is_refused_and_never_cut() -> None:
    done = run("run", str(smollm2_path()), "word " * 50, "--ctx", "40")
    assert done.returncode == 7
    assert "the context holds 40" in done.stderr
    assert done.stdout == ""


def test_an_answer_ends_where_the_context_does() -> None:
    done = run("run", str(smollm2_path()), "Count to a hundred.", "--ctx", "48", "--json")
    answer = json.loads(done.stdout)
    assert answer["finish_reason"] == "context"
    assert len(answer["prompt_ids"]) + len(answer["ids"]) == 48


def test_ctrl_c_keeps_what_was_generated() -> None:
    command = [*ETE, "run", str(smollm2_path()), "Tell me a long story.", "--max-tokens", "4000", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len((first + output).decode()) > 1
    assert errors.splitlines()[-1].startswith(b"prompt ")  # on a busy machine after progress of the prompt
    assert b"Traceback" not in errors


def test_a_conversation_from_a_pipe_is_what_the_python_interface_answers() -> None:
    turns = ["My name is Ann.", "What is my name?"]
    done = run("chat", str(smollm2_path()), "--max-tokens", "20", stdin="\n".join([*turns, "/exit", "not this"]))
    said = [line for line in done.stderr.splitlines() if not line.startswith(("loading ", "reading the prompt: "))]
    assert (done.returncode, said) == (0, [])  # progress is told on a busy machine
    messages: list[dict[str, str]] = []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        with LLM(smollm2_path()) as llm:  # a fresh one for each turn: what is kept between turns changes nothing
            answers.append(llm.generate(messages, max_tokens=20).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)


def test_same_seed_same_text() -> None:
    arguments = ["run", str(smollm2_path()), "Name a colour.", "--temperature", "1", "--max-tokens", "12", "--json"]
    texts = [json.loads(run(*arguments, "--seed", seed).stdout)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
