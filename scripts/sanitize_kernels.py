"""Launch every Triton kernel on small inputs, for NVIDIA's compute-sanitizer.

Run it as ``compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py``, and with ``--tool racecheck``.
"""

from __future__ import annotations

import itertools

import torch

from locks_hf.kernels import SummaryLayout, attend, backend, combine, score, summarize, top_pages


def main() -> None:
    """Run all ops for every dtype and the head_dims with kernels of their own shape."""
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
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
