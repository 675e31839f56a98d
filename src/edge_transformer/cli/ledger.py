"""What lies where on the GPU and on the host beside it, said before the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_transformer.cli.console import size

if TYPE_CHECKING:
    from edge_transformer import LLM
    from edge_transformer.placement.plan import Plan, Rates, RingCost

_HEADS = {
    "gpu": "on the GPU",
    "streamed": "on the GPU, its rows streamed in blocks",
    "split": "rows streamed to the GPU in blocks, the others on the CPU meanwhile",
    "cpu": "on the CPU",
}


def ledger_of(llm: LLM) -> str | None:
    """The ledger of a model on a GPU, and a line on host memory; None for one on the CPU."""
    if llm.plan is None:
        return None
    memory = llm.memory
    parts = [
        f"{size(memory[name])} {what}"
        for name, what in (
            ("weights_mapped", "of weights where the file lies"),
            ("weights_rearranged", "of weights re-arranged"),
        )
        if memory[name]
    ]
    if llm.plan.kv == "host":
        parts.append(f"{size(memory['kv_per_token'])} of KV cache for each token")
    return f"{ledger(llm.plan)}\nhost memory: {', '.join(parts)}"


def ledger(plan: Plan) -> str:
    """One line per entry of the arena, and what each token moves over the bus."""
    lines = [f"GPU memory: {size(plan.arena_bytes)} in one arena"]
    lines += [f"  {label}: {size(nbytes)}" for label, nbytes in plan.ledger if nbytes]
    lines.append(f"  KV cache: {'on the GPU' if plan.kv == 'gpu' else 'in host memory, streamed through two buffers'}")
    rows = f"{plan.head_streamed_rows:,} of its " if plan.head == "split" else ""
    lines.append(f"  output projection: {rows}{_HEADS[plan.head]}{_measured(plan.rates)}")
    streamed = sum(not stays for stays in plan.resident)
    if plan.slots:
        parts = f"{streamed} of {len(plan.resident)} layers"
        if plan.head_streamed_rows:
            head = "the output projection" if plan.head == "streamed" else "a part of the output projection"
            parts = f"{parts} and {head}" if streamed else head
        lines.append(f"  {parts}: {size(plan.streamed_bytes)} over the bus each pass")
    else:
        lines.append("  no weights over the bus: all layers are resident, and no slots are needed")
    if plan.unmeasured:
        lines.append(
            f"  the output projection's place was chosen without measuring the bus and the CPU: {plan.unmeasured}"
        )
    if plan.ring is not None:
        lines.append(f"  {_ring(plan.ring)}")
    return "\n".join(lines)


def _measured(rates: Rates | None) -> str:
    if rates is None:
        return ""
    return f" (the bus {rates.bus / 1e9:.1f} GB/s, the CPU {rates.host_head / 1e9:.1f} GB/s, measured at load)"


def _ring(ring: RingCost) -> str:
    cost = "loading was slower" if ring.bus_share is None else f"about {ring.bus_share:.0%} of the bus's speed"
    return (
        f"the host refuses to page-lock {size(ring.unlocked_bytes)} of weights; they go through a ring of "
        f"{size(ring.ring_bytes)}: {cost} (ulimit -l raises the limit)"
    )
