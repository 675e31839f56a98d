"""All stages of gpu_figures.py by name: each a function that takes a Session, measures, and yields figures as it gets
them.
"""

from __future__ import annotations

import gpu_stages_hybrid as hybrid
import gpu_stages_llama as llama
from gpu_session import Stage
from gpu_stages_checks import golden, product_errors, sanitizer, script

SANITIZED = ("gemma2_long", "qwen3_5")

STAGES: dict[str, Stage] = {
    "ceilings": llama.ceilings,
    "1b-resident": llama.small_resident,
    "1b-two-slots": llama.small_two_slots,
    "1b-two-slots-offload": llama.small_two_slots_offload,
    "1b-offload": llama.small_offload,
    "8b-q8_0": llama.large_q8_0,
    "8b-q8_0-streamed": llama.large_q8_0_streamed,
    "8b-q4_0": llama.large_q4_0,
    "8b-q4_0-streamed": llama.large_q4_0_streamed,
    "sm75-1b": llama.plain_small,
    "sm75-8b": llama.plain_large,
    "trace": llama.trace,
    "1b-offload-peer": llama.small_offload_peer,
    "9b-streamed": hybrid.streamed,
    "9b-long": hybrid.long_context,
    "9b-placements": hybrid.placements,
    "9b-trace": hybrid.trace,
    "9b-resident-own": hybrid.resident_own,
    "9b-sm75": hybrid.plain,
    "9b-quantization": hybrid.quantization,
    "9b-row-streamed": hybrid.streamed_row,
    "9b-q8_0": hybrid.resident_q8_0,
    "9b-q4_0": hybrid.resident_q4_0,
    "9b-host-prefill": hybrid.host_prefill,
    "errors": product_errors(),
    "errors-sm75": product_errors("--plain"),
    "smoke": script("tests/cuda/gpu_smoke.py"),
    "modes": script("tests/cuda/gpu_modes.py", "--tensor"),
    "modes-sm75": script("tests/cuda/gpu_modes.py", "--plain"),
    "golden": golden(),
    "golden-sm75": golden("--plain"),
    "faults": script("tests/cuda/gpu_faults.py"),
    **{f"sanitizer-{tool}": sanitizer(tool, SANITIZED) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")},
}
"""In the order in which they are run. Those of one model follow each other, so that few are on disk at a time."""
