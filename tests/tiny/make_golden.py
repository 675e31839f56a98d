"""Make tests/golden/tiny/*.json with transformers, asserting that the models are able to fail.

Run in the folder tests, with the golden group installed: `python -m tiny.make_golden [model ...]`.
For each model, with weights made from its seed:
- transformers in float32 lies within 6e-7 * max(1, max |logit|) of transformers in float64;
- ignoring each of the model's fields moves a kept logit by at least 100 bounds (1e-5 * max(1, max |logit|)).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiny.models import MODELS, TinyModel, with_fields
from tiny.weights import Array, digest, make_weights, positions, prompts
from tiny.write import write_hf

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
BOUND = 1e-5
SELF_BOUND = 6e-7


def transformers_logits(
    config: Mapping[str, object], weights: Mapping[str, Array], prompt: list[int], dtype: str = "float32"
) -> npt.NDArray[np.float64]:
    """Logits [len(prompt), V] of transformers' eager forward pass of the model in one piece, as float64."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_hf(Path(folder), config, weights)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return np.asarray(logits.double().numpy())


def make(model: TinyModel) -> dict[str, object]:
    """The golden record of a model; raises AssertionError when the model could not fail."""
    weights = make_weights(model)
    kept = positions(model)
    record: dict[str, object] = {
        "config": model.config,
        "seed": model.seed,
        "weights_sha256": digest(weights),
        "prompts": [],
    }
    entries = []
    for index, (prompt, rows) in enumerate(zip(prompts(model), kept, strict=True)):
        logits = transformers_logits(model.config, weights, prompt)
        exact = transformers_logits(model.config, weights, prompt, "float64")
        scale = max(1.0, float(np.abs(logits).max()))
        own_error = float(np.abs(logits - exact).max()) / scale
        assert own_error <= SELF_BOUND, f"{model.name}: float32 is {own_error:.2e} from float64"
        print(f"{model.name}[{index}]: max |logit| {scale:.2f}, float32 to float64 {own_error:.1e}", flush=True)
        if index == 0:
            for name, changes in model.ignoring.items():
                ignored = transformers_logits(with_fields(model.config, changes), weights, prompt)
                moved = float(np.abs(ignored - logits)[rows].max()) / scale / BOUND
                print(f"  ignoring {name}: {moved:.0f} bounds", flush=True)
                assert moved >= 100, f"{model.name}: ignoring {name} moves the logits by {moved:.1f} bounds only"
        entries.append(
            {
                "ids": prompt,
                "positions": rows,
                "logits": [[float(f"{value:.9g}") for value in logits[row]] for row in rows],
            }
        )
    record["prompts"] = entries
    return record


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        record = make(MODELS[name])
        (GOLDEN / f"{name}.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
