"""What lies where on the GPU, said before the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_transformer.cli.console import size

if TYPE_CHECKING:
    from edge_transformer.placement.plan import Plan, RingCost


def ledger(plan: Plan) -> str:
    """One line per entry of the arena, and what each token moves over the bus."""
    lines = [f"GPU memory: {size(plan.arena_bytes)} in one arena"]
    lines += [f"  {label}: {size(nbytes)}" for label, nbytes in plan.ledger if nbytes]
    lines.append(f"  KV cache: {'on the GPU' if plan.kv == 'gpu' else 'in host memory, streamed through two buffers'}")
    lines.append(f"  output projection: on the {'GPU' if plan.head == 'gpu' else 'CPU'}")
    streamed = sum(not stays for stays in plan.resident)
    if streamed:
        lines.append(f"  {streamed} of {len(plan.resident)} layers: {size(plan.streamed_bytes)} over the bus each pass")
    if plan.ring is not None:
        lines.append(f"  {_ring(plan.ring)}")
    return "\n".join(lines)


def _ring(ring: RingCost) -> str:
    cost = "loading was slower" if ring.bus_share is None else f"about {ring.bus_share:.0%} of the bus's speed"
    return (
        f"the host refuses to page-lock {size(ring.unlocked_bytes)} of weights; they go through a ring of "
        f"{size(ring.ring_bytes)}: {cost} (ulimit -l raises the limit)"
    )
