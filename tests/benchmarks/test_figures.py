"""The figures' scripts without a GPU: storing and going on, the table, llama-bench's JSON, idle time, limits."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import gpu_figures
import gpu_measure
import gpu_session
import gpu_stages_checks
from bus_gaps import idle_time, without_first_passes
from figures import Figure, StageResult, at_least, at_most, beside, load, number, save, stated, summary, table
from gpu_measure import HeadRates, decode_limit
from gpu_session import Session
from gpu_stages import STAGES
from llama_bench import parse, peer_rate

from edge_transformer.cuda.timeline import COMPUTE_TRACK, CPU_TRACK, DECODE_PASS, Kind, Span
from edge_transformer.placement.plan import HeadPlace, KvPlace

# As llama-bench prints it; most fields left out.
SAMPLE = """[
  {
    "build_commit": "0", "backends": "CUDA", "model_filename": "8b-q8_0.gguf", "n_batch": 2048, "n_ubatch": 512,
    "n_gpu_layers": 99, "no_kv_offload": false, "flash_attn": 0, "load_mode": "mmap",
    "n_prompt": 0, "n_gen": 64, "n_depth": 512, "avg_ns": 301, "stddev_ns": 1, "avg_ts": 212.6, "stddev_ts": 0.2,
    "samples_ns": [ 301, 302, 300 ],
    "samples_ts": [ 212.5, 211.0, 213.0 ]
  },
  {
    "n_gpu_layers": 99, "no_kv_offload": false, "flash_attn": 1, "load_mode": "mmap",
    "n_prompt": 0, "n_gen": 64, "n_depth": 512, "avg_ts": 217.0,
    "samples_ns": [ 1 ],
    "samples_ts": [ 216.0, 218.5, 217.0 ]
  }
]
"""


# ---- stages: stored, gone on with, failing


SESSION = Session(Path(), 1)


def two_then_error(session: Session) -> Iterator[Figure]:
    yield stated("first", 1.5, "tok/s")
    yield at_least("second", 94.0, 95, "%")
    raise ValueError("the card caught fire")


def test_an_error_keeps_the_figures_that_were_there_and_is_stored(tmp_path: Path) -> None:
    assert gpu_figures.run_stage("burning", two_then_error, SESSION, tmp_path) == 1
    result = load(tmp_path, "burning")
    assert result is not None
    assert [figure.what for figure in result.figures] == ["first", "second"]
    assert result.error == "ValueError: the card caught fire"
    assert [file.name for file in tmp_path.iterdir()] == ["burning.json"]


def test_a_stage_that_was_killed_is_not_taken_for_one_that_ended(tmp_path: Path) -> None:
    stage = two_then_error(SESSION)
    for figure in (next(stage), next(stage)):
        save(tmp_path, StageResult("killed", 1.0, [figure], "it did not come to its end"))
    options = gpu_figures.parse_arguments([str(tmp_path)])
    assert gpu_figures._to_be_run("killed", options)


def test_what_is_stored_is_not_run_again_unless_it_is_named(tmp_path: Path) -> None:
    save(tmp_path, StageResult("done", 1.0, [stated("a", 1, "s")]))
    assert not gpu_figures._to_be_run("done", gpu_figures.parse_arguments([str(tmp_path)]))
    assert gpu_figures._to_be_run("done", gpu_figures.parse_arguments([str(tmp_path), "--only", "done"]))
    assert not gpu_figures._to_be_run("other", gpu_figures.parse_arguments([str(tmp_path), "--only", "done"]))


@pytest.mark.parametrize("text", ["", "{", '{"stage": "done"}', '{"stage": "done", "seconds": 1, "figures": [{}]}'])
def test_a_damaged_result_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "done.json").write_text(text)
    assert load(tmp_path, "done") is None


def test_a_process_is_ended_after_its_time() -> None:
    assert gpu_figures.run_process([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == "ended after 0 s"


@pytest.mark.parametrize(("code", "error"), [(0, ""), (1, ""), (3, "the process ended with 3")])
def test_how_a_process_ended(code: int, error: str) -> None:
    assert gpu_figures.run_process([sys.executable, "-c", f"raise SystemExit({code})"], 30) == error


def test_without_a_gpu_every_stage_stores_its_error_and_the_next_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_figures, "run_process", lambda command, seconds: "the process ended with -11")
    monkeypatch.setattr(sys, "argv", ["gpu_figures.py", str(tmp_path)])
    assert gpu_figures.main() == 1
    output = capsys.readouterr().out
    for name in STAGES:
        assert f"- {name}, after 0 s: the process ended with -11" in output
    assert f"{len(STAGES)} stages, {len(STAGES)} failed; 0 figures asked, 0 missed" in output


def test_an_interrupt_keeps_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], seconds: float) -> str:
        if "ceilings" in command:
            save(tmp_path, StageResult("ceilings", 1.0, [stated("bus", 55.4, "GB/s")]))
            return ""
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_figures, "run_process", interrupted)
    monkeypatch.setattr(sys, "argv", ["gpu_figures.py", str(tmp_path)])
    assert gpu_figures.main() == gpu_figures.INTERRUPTED
    assert load(tmp_path, "ceilings") is not None


def test_an_unknown_stage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_figures.py", str(tmp_path), "--only", "ceiling"])
    with pytest.raises(SystemExit, match="no stage ceiling; there are: ceilings"):
        gpu_figures.main()


def test_other_models_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, shape: str, file_format: str, threads: int) -> Path:
        if any(tmp_path.iterdir()):
            raise OSError("no room")
        path.touch()
        return path

    monkeypatch.setattr(gpu_session, "write_model", write)
    (tmp_path / "8b-hf").mkdir()
    (tmp_path / "8b-hf" / "model.safetensors").touch()
    (tmp_path / "8b-q4_0.gguf.partial").touch()
    session = Session(tmp_path, 1)
    assert session.model("1b", "BF16") == session.model("1b", "BF16") == tmp_path / "1b-bf16.gguf"
    assert list(tmp_path.iterdir()) == [tmp_path / "1b-bf16.gguf"]
    with pytest.raises(OSError, match="no room"):  # the first model is in use
        session.model("8b", "Q4_0")
    assert (tmp_path / "1b-bf16.gguf").exists()


# ---- stages that run scripts


def said(monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> list[list[str]]:
    """Commands that stages run from now on, each of which ends with `code` and says `text`."""
    commands: list[list[str]] = []

    def output(command: list[str], seconds: float) -> tuple[int, list[str]]:
        commands.append(list(command))
        return code, text.splitlines()

    monkeypatch.setattr(gpu_stages_checks, "_output", output)
    return commands


def test_verdicts_of_a_script_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, 1, "ok      one: fine\nnoise\nFAILED  two: bad\nok      three\n")
    passed, failed = STAGES["faults"](SESSION)
    assert (passed.value, passed.terms) == (2, "one: fine ; three")
    assert (failed.value, failed.met, failed.terms) == (1, False, "FAILED  two: bad")
    said(monkeypatch, 1, "ok      one\nTraceback\nValueError: why\n")
    assert list(STAGES["faults"](SESSION))[1].terms == "status 1: ok      one | Traceback | ValueError: why"


def test_golden_answers_need_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = said(monkeypatch, 0, "ok      smollm2 all resident: ids of 9/9 prompts\n")
    with pytest.raises(FileNotFoundError, match="--smollm2"):
        list(STAGES["golden"](SESSION))
    session = Session(Path(), 1, real={"smollm2": Path("/m.gguf")})
    passed, failed = STAGES["golden-sm75"](session)
    assert passed.value == 1
    assert failed.met
    assert commands[0][1:] == ["tests/cuda/gpu_golden.py", "--smollm2", "/m.gguf", "--plain"]


def test_errors_of_products_stand_beside_those_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "NVIDIA (9, 0)\nlargest error\nQ8_0   12288: GEMM, --fast-prefill, GEMV:   4.8e-07   1.7e-03   3.0e-07\n"
    said(monkeypatch, 0, lines)
    (figure,) = STAGES["errors"](SESSION)
    assert (figure.value, figure.met) == (4.8e-7, True)
    assert (
        figure.terms == "GEMV 3.0e-07, --fast-prefill 1.7e-03; design, three terms promoted 5.0e-7, numpy fp32 4.3e-7"
    )
    said(monkeypatch, 1, lines)
    with pytest.raises(RuntimeError, match="ended with 1"):
        list(STAGES["errors-sm75"](SESSION))


@pytest.mark.parametrize(
    ("code", "text", "values"),
    [
        (0, "ok      llama\n========= ERROR SUMMARY: 0 errors\n", [0] * 4),
        (9, "========= Race\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n", [3] * 4),
        (1, "FAILED  llama\n========= ERROR SUMMARY: 0 errors\n", [1] * 4),
    ],
)
def test_findings_of_the_sanitizer(code: int, text: str, values: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, code, text)
    figures = list(STAGES["sanitizer-racecheck"](SESSION))
    assert [figure.value for figure in figures] == values
    said(monkeypatch, 1, "no such tool\n")
    with pytest.raises(RuntimeError, match="no summary, status 1: no such tool"):
        list(STAGES["sanitizer-memcheck"](SESSION))


# ---- the table


def test_the_table_says_what_was_asked_measured_and_missed(tmp_path: Path) -> None:
    figures = [
        at_least("of the limit", 94.7, 95, "%", "20 MB / 55 GB/s"),
        at_most("arena", 109.5, 150, "MB"),
        *beside("decode", 656.0, None, 1.0, "tok/s"),
        stated("a | b", 60900.4, "tok/s"),
    ]
    save(tmp_path, StageResult("one", 2.0, figures))
    save(tmp_path, StageResult("two", 3.4, [], "GpuError: two\nlines"))
    assert table(tmp_path, ["one", "two", "three"]).splitlines() == [
        "| stage | figure | asked | measured | met | terms |",
        "|---|---|---|---|---|---|",
        "| one | of the limit | >= 95 % | 94.7 % | **no** | 20 MB / 55 GB/s |",
        "| one | arena | <= 150 MB | 110 MB | yes |  |",
        "| one | decode | >= 1 x llama.cpp | 656 tok/s | not run |  |",
        "| one | a \\| b |  | 60900 tok/s |  |  |",
        "",
        "Failed:",
        "",
        "- two, after 3 s: GpuError: two lines",
        "",
        "Not run: three.",
    ]


def test_beside_a_peer_the_ratio_is_what_is_asked() -> None:
    ours, peer, ratio = beside("prefill", 300.0, 400.0, 0.7, "tok/s", "fa 1")
    assert (ours.value, peer.value, peer.terms) == (300.0, 400.0, "fa 1")
    assert (ratio.value, ratio.met, ratio.asked) == (0.75, True, ">= 0.7 x llama.cpp")
    assert [figure.met for figure in (ours, peer)] == [None, None]
    assert beside("prefill", 279.0, 400.0, 0.7, "tok/s")[2].met is False


def test_the_summary_counts() -> None:
    results = [StageResult("a", 1, [at_least("x", 1, 2, ""), at_most("y", 1, 2, "")]), StageResult("b", 1, [], "no")]
    assert summary(results) == "2 stages, 1 failed; 2 figures asked, 1 missed"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.4567, "0.457"), (94.66, "94.7"), (999.6, "1000"), (61234.5, "61234")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


# ---- llama-bench


def test_tests_of_llama_bench_are_read() -> None:
    off, on = parse(SAMPLE)
    assert (off.rate, on.rate) == (212.5, 217.0)
    assert (off.flash_attention, on.flash_attention) == (False, True)
    assert (on.prompt, on.generated, on.depth) == (0, 64, 512)
    assert on.options == "-ngl 99, fa 1, load mmap"


@pytest.mark.parametrize("end", [1, 300, -10])
def test_json_that_was_cut_off_gives_no_tests(end: int) -> None:
    assert parse(SAMPLE[:end]) == []


def fake_bench(folder: Path, text: str, code: int) -> Path:
    file = folder / "llama-bench"
    file.write_text(
        f"#!/bin/sh\nprintf '%s' \"$*\" > {folder}/arguments\ncat <<'END'\n{text}END\necho why >&2\nexit {code}\n"
    )
    file.chmod(0o755)
    return file


def test_the_better_of_flash_attention_off_and_on_counts(tmp_path: Path) -> None:
    result = peer_rate(fake_bench(tmp_path, SAMPLE, 0), Path("m.gguf"), "-ngl", "99")
    assert result.rate == 217.0
    assert (tmp_path / "arguments").read_text() == "-m m.gguf -ngl 99 -o json -fa 0,1"


@pytest.mark.parametrize(("text", "code"), [(SAMPLE, 1), ("[\n]\n", 0), ("", 0)])
def test_a_call_that_fails_or_tests_nothing_is_an_error(text: str, code: int, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"llama-bench ended with {code}: why"):
        peer_rate(fake_bench(tmp_path, text, code), Path("m.gguf"))


# ---- idle time of the bus


def spans() -> list[Span]:
    """Two passes of 10 s. Copies: 0-3, 4-9 and 9.5-18; the GPU computes in 2-5, waits in 8-9.2."""
    return [
        Span(CPU_TRACK, Kind.HOST, DECODE_PASS, 0, 10),
        Span(CPU_TRACK, Kind.HOST, "layer 0 mixer", 3.25, 3.5),
        Span(CPU_TRACK, Kind.HOST, DECODE_PASS, 10, 20),
        Span("weight copies", Kind.TO_GPU, "slot", 0, 3),
        Span("weight copies", Kind.TO_GPU, "slot", 4, 9),
        Span("weight copies", Kind.TO_GPU, "slot", 9.5, 18),
        Span(COMPUTE_TRACK, Kind.KERNELS, "layer 0 mixer", 2, 5),
        Span(COMPUTE_TRACK, Kind.WAIT, "waits for weight copies", 8, 9.2),
    ]


def test_idle_time_by_what_went_on() -> None:
    causes = dict(idle_time(spans()))
    assert causes == pytest.approx(
        {
            f"(GPU idle; CPU in {DECODE_PASS})": 2.3,
            f"(GPU in mixer; CPU in {DECODE_PASS})": 0.75,
            "(GPU in mixer; CPU queues a layer)": 0.25,
            f"(GPU waits for weight copies; CPU in {DECODE_PASS})": 0.2,
        }
    )
    assert next(iter(causes)) == f"(GPU idle; CPU in {DECODE_PASS})"


def test_first_passes_are_left_out() -> None:
    left = without_first_passes(spans(), 1)
    assert [span.start for span in left if span.name == DECODE_PASS] == [10]
    assert dict(idle_time(left)) == pytest.approx({f"(GPU idle; CPU in {DECODE_PASS})": 2})
    assert without_first_passes(spans(), 2) == []
    assert idle_time([]) == []


# ---- what the buses allow


def opened(head: HeadPlace, kv: KvPlace) -> Any:
    streamed_rows = {HeadPlace.STREAMED: 30, HeadPlace.SPLIT: 10}.get(head, 0)
    plan = SimpleNamespace(
        streamed_bytes=900, slots=2, slot_bytes=50, head=head, head_streamed_rows=streamed_rows, kv=kv
    )
    layout = SimpleNamespace(rows=30)
    return SimpleNamespace(
        plan=plan, head=SimpleNamespace(layout=layout), head_bytes=300, kv_bytes=lambda depth: 2 * depth
    )


def test_limits_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measure, "host_head_rates", lambda opened: HeadRates(200.0, 0.0, 0.0))
    assert decode_limit(opened(HeadPlace.GPU, KvPlace.GPU), 10, 100.0).seconds == pytest.approx(9)
    assert decode_limit(opened(HeadPlace.STREAMED, KvPlace.HOST), 10, 100.0).seconds == pytest.approx(9.2)
    # The head takes 1.5 s on the CPU; 100 bytes of slots are filled in 1 s of them.
    limit = decode_limit(opened(HeadPlace.CPU, KvPlace.GPU), 10, 100.0)
    assert limit.seconds == pytest.approx(9.5)
    assert "hide 1000.00 ms" in limit.terms
    # 200 bytes of it take 1 s there; meanwhile the bus brings the other 100, which are part of its 900, and the slots'.
    assert decode_limit(opened(HeadPlace.SPLIT, KvPlace.GPU), 10, 100.0).seconds == pytest.approx(9)
    monkeypatch.setattr(gpu_measure, "host_head_rates", lambda opened: HeadRates(50.0, 0.0, 0.0))
    assert decode_limit(opened(HeadPlace.SPLIT, KvPlace.GPU), 10, 100.0).seconds == pytest.approx(9 + 4 - 2)
    monkeypatch.setattr(gpu_measure, "host_head_rates", lambda opened: HeadRates(500.0, 0.0, 0.0))
    assert decode_limit(opened(HeadPlace.CPU, KvPlace.GPU), 10, 100.0).seconds == pytest.approx(9)
