"""Launch every Triton kernel on small inputs, for NVIDIA's compute-sanitizer.

Run it as ``compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py``, and with ``--tool racecheck``.
"""

from __future__ import annotations

import itertools

import torch

from locks_hf.kernels import SummaryLayout, attend, backend, combine, decode_step, score, summarize, top_pages


def main() -> None:
    """Run all ops for every dtype and the head_dims with kernels of their own shape, then decode steps."""
    if not backend.use_triton(torch.device("cuda")):
        raise SystemExit("the Triton kernels do not run here: see python -m locks_hf.env_report")
    torch.manual_seed(0)
    rows, heads, group, pages = 2, 2, 3, 21
    lengths = torch.tensor([20 * 16 + 3, 7 * 16], dtype=torch.int32, device="cuda")
    for head_dim, dtype in itertools.product((64, 96, 128, 256), (torch.float32, torch.bfloat16, torch.float16)):
        layout = SummaryLayout(head_dim, 4)
        keys = torch.randn(rows, heads, pages * 16, head_dim, device="cuda").to(dtype)
        values = torch.randn_like(keys)
        query = torch.randn(rows, heads * group, head_dim, device="cuda").to(dtype)
        flat = keys.unflatten(2, (pages, 16)).flatten(0, 2)
        for refit in (True, False):
            summaries = summarize(flat, layout, refit)
        summaries = {name: array.unflatten(0, (rows, heads, pages)) for name, array in summaries.items()}
        lse = score(query, summaries, lengths // 16, 20, layout, head_dim**-0.5)
        for rule in ("max", "mass", "share"):
            value = combine(lse, lengths // 16, rule)
        chosen = top_pages(value, lengths, 16, 6)
        output = attend(query, keys, values, chosen, lengths, 16, head_dim**-0.5)
        if not torch.isfinite(output).all():
            raise SystemExit(f"output of head_dim {head_dim}, {dtype} is not finite")
    for head_dim, rank, pages in itertools.product((64, 96, 128), (3, 4, 8), (21, 5000)):
        decode(SummaryLayout(head_dim, rank), rows, heads, group, pages)
    torch.cuda.synchronize()
    print("all kernels ran")


def decode(layout: SummaryLayout, rows: int, heads: int, group: int, pages: int) -> None:
    """Decode steps over the end of a page, few pages or many."""
    capacity, head_dim = pages * layout.page_size, layout.head_dim
    keys = torch.randn(rows, heads, capacity, head_dim, device="cuda", dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    summaries = summarize(keys.unflatten(2, (pages, layout.page_size)).flatten(0, 2), layout, True)
    summaries = {name: array.unflatten(0, (rows, heads, pages)) for name, array in summaries.items()}
    counts = torch.tensor([capacity - 20, capacity // 2, capacity - 20], dtype=torch.int32, device="cuda")
    for step in range(layout.page_size + 2):
        query = torch.randn(rows, heads * group, head_dim, device="cuda", dtype=torch.bfloat16)
        key, value = torch.randn(2, rows, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        real = torch.tensor([True, step % 2 == 0], device="cuda")
        state = (keys, values, summaries, counts, layout, True, "share", 6)
        output = decode_step(query, key, value, real, *state, head_dim**-0.5)
        if not torch.isfinite(output).all():
            raise SystemExit(f"step {step} of head_dim {head_dim}, rank {layout.rank}, {pages} pages is not finite")


if __name__ == "__main__":
    main()
