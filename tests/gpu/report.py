"""Prints the table of docs/gpu.md: kernels and copies of Llama-3.1-8B's requests, traced on fake CUDA tensors.

Run it in the environment of ``.ci/gpu``: ``python -m tests.gpu.report``.
"""

from __future__ import annotations

import datetime
from functools import partial

import torch
import transformers

from kvboost.hf.ragged import RaggedRunner
from kvboost.hf.rows import RowBatch
from tests.helpers.fake_cuda import DEVICE, FakeCuda, Trace

PROMPT, SUFFIX = list(range(3, 8195)), list(range(9, 109))
FLASH, MASKED = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


def traces(cuda: FakeCuda) -> dict[str, tuple[Trace, Trace]]:
    """Of each request, plain Transformers' trace and ours."""
    model = cuda.model()
    past = None

    def plain(ids: torch.Tensor) -> None:
        nonlocal past
        past = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values

    def ids(rows: int, tokens: int) -> torch.Tensor:
        return torch.zeros(rows, tokens, dtype=torch.long, device=DEVICE)

    bare_cold = cuda.trace(lambda: plain(ids(1, len(PROMPT))))
    bare_warm = cuda.trace(lambda: plain(ids(1, len(SUFFIX))))
    past = None
    with torch.no_grad():
        plain(ids(8, 3000))
    bare_decode = cuda.trace(lambda: plain(ids(8, 1)))
    past, lengths = None, list(range(200, 4000, 500))
    with torch.no_grad():
        plain(ids(8, max(lengths)))
    padded = torch.tensor([[0] * (max(lengths) - length) + [1] * (length + 1) for length in lengths]).to(DEVICE)
    bare_padded = cuda.trace(lambda: model(ids(8, 1), attention_mask=padded, past_key_values=past, use_cache=True))
    with cuda.engine(model, workspace_bytes=0) as engine:
        cold = cuda.trace(lambda: engine.prefill(PROMPT))
        warm = cuda.trace(lambda: engine.prefill([*PROMPT, *SUFFIX]))
        runner, layout = engine.parts.runner, engine.parts.layout
        assert layout is not None
        ragged = RaggedRunner(runner, in_pages=True)
        decoded = []
        for held in (list(range(2993, 3001)), lengths):
            batch = RowBatch(layout)
            for length in held:
                batch.add(tokens=length + 100).set_length(length)
            ragged.decode([5] * 8, batch)  # rows are cleared once
            decoded.append(cuda.trace(partial(ragged.decode, [5] * 8, batch)))
    return {
        "8,192 tokens, cold": (bare_cold, cold),
        "100 tokens after 8,192 that are known": (bare_warm, warm),
        "one token of 8 sequences of 3,000": (bare_decode, decoded[0]),
        "one token of 8 sequences of 200 to 3,700": (bare_padded, decoded[1]),
    }


def main() -> None:
    """Print the table."""
    print(
        f"{datetime.date.today()}; torch {torch.__version__}, transformers {transformers.__version__}; fake tensors\n"
    )
    print("| request | plain: kernels | copied | attention with a mask | ours: kernels | copied | with a mask |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with FakeCuda() as cuda:
        for name, pair in traces(cuda).items():
            cells = (
                f"{one.total:,} | {(one.copied.total() - one.copied['_to_copy']) / 1e9:.2f} GB | {one.ops[MASKED]}"
                for one in pair
            )
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
