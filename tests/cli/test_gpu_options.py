"""Options of a GPU: sizes, what is passed on, what is refused without --backend cuda, and the ledger."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest
from click.testing import CliRunner

from edge_transformer import LLM, GpuSettings
from edge_transformer.cli.ledger import ledger, ledger_of
from edge_transformer.cli.main import ete
from edge_transformer.cli.options import Capability, Size, load_model
from edge_transformer.errors import UsageError
from edge_transformer.placement.plan import Demand, Wishes, make_plan
from emulator import EmulatedGpu
from engine.test_llm import write_chat_model


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 << 20),
        ("3.5GB", 3_500_000_000),
        ("400", 400),
        ("1 gib", 1 << 30),
        ("2K", 2048),
        ("0.5M", 1 << 19),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Size().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1MB", "1e9", "5 XB", "1.2.3MB", "9" * 40, "nan", "1MB "])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size"):
        Size().convert(text, None, None)


def test_capabilities() -> None:
    assert Capability().convert("7.5", None, None) == (7, 5)
    for text in ("75", "7.", "a.b", "7.55"):
        with pytest.raises(click.BadParameter, match="compute capability"):
            Capability().convert(text, None, None)


NOTHING = {
    "ctx": None, "threads": None, "kv_dtype": "bf16", "offline": True, "device": None, "vram": None,
    "resident_layers": None, "slots": None, "kv_offload": None, "lm_head": None, "fast_prefill": False,
    "gpu_arch": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"vram": 1}, "--vram"),
        ({"resident_layers": 0}, "--resident-layers"),
        ({"slots": 2}, "--slots"),
        ({"kv_offload": True}, "--kv-offload"),
        ({"kv_offload": False}, "--no-kv-offload"),
        ({"lm_head": "cpu"}, "--lm-head"),
        ({"device": 0}, "--device"),
        ({"fast_prefill": True}, "--fast-prefill"),
    ],
)
def test_options_of_a_gpu_need_one(given: dict[str, object], name: str) -> None:
    """Refused by the name that was typed."""
    with pytest.raises(click.UsageError, match=f"^{name} needs --backend cuda"):
        load_model("demo", NOTHING | {"backend": "cpu"} | given, lambda *_: None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--vram", "0"), "Error: --vram (vram_bytes in Python) is 0; allowed: 1 byte or more"),
        (
            ("--gpu-arch", "5.0"),
            "--gpu-arch (force_capability in Python) is 5.0; allowed: 7.5, the oldest path there is",
        ),
        (("--gpu-arch", "7.4"), "--gpu-arch (force_capability in Python) is 7.4; allowed: 7.5"),
    ],
)
def test_values_that_no_gpu_takes_are_refused_before_one_is_sought(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr("edge_transformer.cuda.driver.CudaGpu", lambda *_, **__: pytest.fail("a GPU is sought"))
    result = CliRunner().invoke(ete, ["run", "nowhere", "hello", "--backend", "cuda", *options])
    assert result.exit_code == 2
    assert told in result.stderr


def test_fast_prefill_is_refused_where_it_would_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_chat_model(tmp_path / "m")

    def open_model(capability: tuple[int, int]) -> LLM:
        gpu = EmulatedGpu(0, capability=capability)
        monkeypatch.setattr("edge_transformer.cuda.driver.CudaGpu", lambda *_, **__: gpu)
        return LLM(path, backend="cuda", gpu=GpuSettings(fast_prefill=True, vram_bytes=1 << 28), context_length=512)

    with pytest.raises(UsageError, match=r"--fast-prefill .* needs tensor cores, .* 8\.0 or later; .* path of 7\.5"):
        open_model((7, 5))
    open_model((8, 0)).close()


def test_values_that_a_plan_cannot_have_are_refused_by_their_options() -> None:
    demand = Demand(((1 << 20, 1 << 20),) * 4, 1000, 1 << 20, 1 << 20, 1 << 22, 1 << 16, 1 << 10, (1 << 10,))
    for wishes, told in (
        (Wishes(1 << 40, resident_layers=5), r"is 5; allowed \(--resident-layers\): -1 \(all\), or 0 to 4"),
        (Wishes(1 << 40, slots=1), r"is 1; streaming needs \(--slots\) 2 or more"),
    ):
        with pytest.raises(UsageError, match=told):
            make_plan(demand, wishes)


def test_ledger_tells_what_lies_where() -> None:
    demand = Demand(((1 << 20, 1 << 20),) * 4, 1000, 1 << 20, 1 << 20, 1 << 22, 1 << 16, 1 << 10, (1 << 10,))
    text = ledger(make_plan(demand, Wishes(1 << 40, resident_layers=1, slots=2, kv_offload=True)))
    assert "3 of 4 layers: 6.0 MiB over the bus each pass" in text
    assert "in host memory, streamed through two buffers" in text
    assert "output projection: on the GPU" in text
    resident = ledger(make_plan(demand, Wishes(1 << 40, slots=4)))
    assert "no weights over the bus: all layers are resident, and no slots are needed" in resident


def test_host_memory_is_told_beside_it() -> None:
    demand = Demand(((1 << 20, 1 << 20),) * 4, 1000, 1 << 20, 1 << 20, 1 << 22, 1 << 16, 1 << 10, (1 << 10,))
    memory = {"weights_mapped": 7 << 30, "weights_rearranged": 1 << 20, "kv_per_token": 32 << 10}

    def told(kv_offload: bool) -> str:
        plan = make_plan(demand, Wishes(1 << 40, kv_offload=kv_offload))
        return ledger_of(cast(LLM, SimpleNamespace(plan=plan, memory=memory))) or ""

    weights = "host memory: 7.00 GiB of weights where the file lies, 1.0 MiB of weights re-arranged"
    assert told(False).splitlines()[-1] == weights
    assert told(True).splitlines()[-1] == f"{weights}, 32.0 KiB of KV cache for each token"
    assert ledger_of(cast(LLM, SimpleNamespace(plan=None))) is None


def test_settings_of_a_gpu_are_refused_for_another_backend() -> None:
    with pytest.raises(UsageError, match="backend='cuda'"):
        LLM("demo", gpu=GpuSettings())
    with pytest.raises(UsageError, match="lm_head is 'disk'"):
        GpuSettings(lm_head="disk")
    with pytest.raises(UsageError, match=r"--kv-budget \(kv_bytes in Python\) is 0; allowed: 1 byte or more"):
        GpuSettings(kv_bytes=0)
    assert GpuSettings(force_capability=(7, 5), vram_bytes=1, kv_bytes=1).force_capability == (7, 5)
