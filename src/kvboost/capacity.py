"""Estimates the peak memory of a model that runs requests, from its shape; and shares out what is free of a device.

Used by the engine (``estimate_memory``), by ``kvboost doctor`` and by the server's admission. Every term is something
that is allocated, named beside it; no factor is fitted to measurements. Invariant: more context, more requests side by
side or more bits never make an estimate smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvboost.errors import ConfigError
from kvboost.steps import largest_mask

MIN_STEP, MAX_STEP = 512, 16384  # tokens of a prefill step
_ROUND_TO = 256  # tokens; equal capacities for similar prompts let the workspaces serve them with the same memory
_MAX_HEADROOM = 2048  # tokens; a growing chat then keeps its workspace for several turns
_ROW_STEPS = ((1024, 256), (4096, 512), (8192, 1024))  # up to so many tokens, rows differ by so many
MAX_IDLE = 4
"""Workspaces that are kept for requests to come."""
_PAGE = 4096
_TRANSIT = 2  # pages on their way, one being read while another is computed with
_FLOAT = 4
_PROBE_TOKENS = 12  # computed when an engine is made, with the logits of all of them
_MASK_COPIES = 3  # bytes for each query and key: a mask, and two parts of it while it is being put together


@dataclass(frozen=True)
class WeightMemory:
    """Where the weights are, in bytes."""

    resident: int
    """Weights that stay in memory."""
    buffers: int = 0
    """Buffers through which the others are streamed."""
    streamed: int = 0
    """Weights read from disk in every forward pass."""
    converted_from: int = 0
    """The checkpoint's files, if its dtype is another one: while loading they are mapped beside the copies."""
    packed: int = 0
    """Copies in the layout that the CPU's kernels want, beside the weights themselves."""

    @property
    def in_memory(self) -> int:
        """Bytes in memory while the model runs."""
        return self.resident + self.buffers


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a model's config says about its size."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    element: int
    """Bytes of one number of the model's dtype."""
    parameters: int
    """Numbers in the layers' matrices that one token is multiplied with: what computing it costs."""
    kv_per_token: int
    """Bytes of KV one token takes over all layers."""
    windows: tuple[int | None, ...]
    """How far back each layer looks; None is all the way."""
    masks: bool = True
    """Whether its attention is torch's kernel with a mask, for which shared keys are repeated (sdpa)."""
    tiled: bool = False
    """Whether it runs in tiles, or needs no mask on its accelerator: only layers with a window have one, and no keys
    are repeated."""
    max_positions: int | None = None
    on_host: bool = True
    """Whether it runs on the CPU, where memory counts from when it is first written to."""
    state_bytes: int = 0
    """Of recurrent layers, for each sequence, however long it is."""

    def __post_init__(self) -> None:
        if len(self.windows) != self.layers:
            raise ConfigError(f"{len(self.windows)} windows for {self.layers} layers; give one for each")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of the model."""

    context: int
    """Tokens of each request, prompt and answer."""
    batch: int = 1
    step_tokens: int = 256
    """Tokens of a prompt that one step of prefill computes, at most."""
    stored_per_token: int = 0
    """Bytes of a token in the store: KV as the model has it, or in 8 or 4 bits."""
    packed: bool = False
    """Whether stored KV is in 8 or 4 bits, which takes float32 copies of a chunk while it is made."""
    cache_bytes: int = 0
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    workspace_bytes: int = 0
    stored_tokens: int | None = None
    """Tokens that the store has been given; None counts all caches as full, as they are after a while."""
    kv_bytes: int | None = None
    """Bytes of KV each request may hold in memory; the rest is on the disk."""
    block_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("context", "batch", "step_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class Activations:
    """What one forward pass takes beside weights and KV, at its largest."""

    attention: int
    """States of a step, the mask, and shared keys and values repeated for every head."""
    mlp: int
    logits: int
    packing: int
    """Float32 copies of a chunk on its way into a store of 8 or 4 bits."""
    probing: int
    """Logits of the short text an engine tries its model with."""

    @property
    def peak(self) -> int:
        """These come one after another, and the memory is used again."""
        return max(self.attention, self.mlp, self.logits, self.packing)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by what they are for. The device is where the model runs; on CPUs that is the host's own memory."""

    context: int
    batch: int
    weights: WeightMemory
    kv: int
    """KV of the running requests, in the device's memory."""
    kv_reserved: int
    """What admission counts for them: address space, of which CPUs give only what is written to."""
    kv_spilled: int
    """KV of the running requests on the disk, or beside an accelerator in the host's memory."""
    activations: Activations
    cache: int
    """Chunks kept in memory."""
    workspaces: int
    """Idle caches of earlier requests."""
    runtime: int
    """Python, torch and Transformers themselves, measured before anything was loaded."""
    host_cache: int = 0
    disk_cache: int = 0
    on_host: bool = True
    """Whether the model runs on the host's own memory."""

    @property
    def device_bytes(self) -> int:
        """The peak where the model runs, without the host's share."""
        running = self.weights.in_memory + self.weights.packed + self.kv + self.activations.peak
        running += self.cache + self.workspaces
        return max(running, self.loading if self.on_host else 0)

    @property
    def loading(self) -> int:
        """The peak while the weights are loaded and the model is tried out."""
        return self.weights.in_memory + max(self.weights.converted_from, self.activations.probing)

    @property
    def host_bytes(self) -> int:
        """The host's memory: beside an accelerator, or with everything else where the host is the device."""
        beside = self.runtime + self.host_cache
        return beside + (self.device_bytes if self.on_host else self.kv_spilled)

    @property
    def disk_bytes(self) -> int:
        """What lies on the disk beside the checkpoint."""
        return self.disk_cache + self.weights.streamed + (self.kv_spilled if self.on_host else 0)

    @property
    def peak(self) -> int:
        """The largest memory use at any moment: the process's where it runs on the host, else the accelerator's."""
        return self.host_bytes if self.on_host else self.device_bytes

    def lines(self) -> dict[str, int]:
        """What takes memory, by name."""
        found = {
            "weights": self.weights.in_memory,
            "KV of running requests": self.kv,
            "activations": self.activations.peak,
            "chunks in memory": self.cache,
            "idle workspaces": self.workspaces,
            "Python, torch, Transformers": self.runtime,
        }
        if self.weights.packed:
            found["packed weights"] = self.weights.packed
        if self.host_cache:
            found["chunks in host memory"] = self.host_cache
        return found


def workspace_capacity(tokens: int) -> int:
    """Tokens that the cache of a request with ``tokens`` has capacity for: some headroom, in round numbers."""
    return rounded_capacity(tokens + min(tokens // 4, _MAX_HEADROOM))


def row_capacity(tokens: int) -> int:
    """Tokens that the row of a sequence with ``tokens`` has capacity for, where sequences are decoded together.

    Few different ones, as each is an attention call of its own, and the longer the more of them: there a call has
    enough to do. Never more than :func:`workspace_capacity`, which is what admission reserves.
    """
    step = next((step for most, step in _ROW_STEPS if tokens <= most), _MAX_HEADROOM)
    return -(-max(tokens, 1) // step) * step


def rounded_capacity(tokens: int) -> int:
    """The capacity, in tokens, of a cache that was asked for this much."""
    return -(-max(tokens, 1) // _ROUND_TO) * _ROUND_TO


def step_limit(shape: ModelShape, *, available: int) -> int:
    """The longest step of a prefill: its activations take an eighth of the memory that is available, at most."""
    per_token = (3 * shape.intermediate + 8 * shape.hidden) * shape.element
    return max(MIN_STEP, min(MAX_STEP, available // 8 // per_token))


def request_bytes(tokens: int, *, kv_per_token: int) -> int:
    """What a request with ``tokens``, prompt and answer, may come to hold: what the server's admission counts."""
    return workspace_capacity(tokens) * kv_per_token


def paged_memory(shape: ModelShape, *, tokens: int, budget: int, block_tokens: int) -> tuple[int, int]:
    """Bytes of a paged sequence in memory and spilled. Raises ConfigError if ``budget`` has no page for every layer."""
    frame = -(-block_tokens * shape.kv_per_token // shape.layers // _PAGE) * _PAGE
    minimum = frame * (shape.layers + _TRANSIT)
    if budget < minimum:
        raise ConfigError(
            f"kv_bytes={budget} is too small for blocks of {block_tokens} tokens; give at least {minimum} bytes"
        )
    pages = -(-tokens // block_tokens) * shape.layers
    frames = budget // frame
    return min(frames, pages + _TRANSIT) * frame, max(0, pages - (frames - _TRANSIT)) * frame


def is_paged(shape: ModelShape, work: Workload) -> bool:
    """Whether a request's cache is larger than ``kv_bytes``, and so lies in pages."""
    return work.kv_bytes is not None and request_bytes(work.context, kv_per_token=shape.kv_per_token) > work.kv_bytes


def activations(shape: ModelShape, work: Workload) -> Activations:
    """The largest tensors of one step of prefill, and of the decoding that follows."""
    tokens, seen = min(work.step_tokens, work.context), work.context
    states = tokens * shape.hidden * shape.element
    queries, kv = tokens * shape.heads * shape.head_dim, 2 * tokens * shape.kv_heads * shape.head_dim
    # The residual and its norm (which is computed in float32); queries, keys and values as projected, rotated and
    # attended; the output as the kernel leaves it and as the next matrix wants it.
    held = 2 * states + tokens * shape.hidden * _FLOAT
    attention = held + (4 * queries + 2 * kv) * shape.element
    if not is_paged(shape, work):
        # The mask as it is made, and as numbers for the kernel; one for full and one for sliding attention.
        # A prompt in one step under full attention needs none.
        kinds = len(set(shape.windows)) if not shape.masks or tokens < seen or any(shape.windows) else 0
        if shape.tiled:
            kinds = len(set(shape.windows) - {None})
        # Accelerators may have a grid, whose steps are as long behind many positions as at the beginning.
        elements = min(tokens * seen, largest_mask(seen)) if shape.on_host else tokens * seen
        attention += elements * (_MASK_COPIES * kinds + shape.element) if kinds else 0
        if shape.masks and not shape.tiled and shape.heads != shape.kv_heads:
            attention += 2 * shape.heads * seen * shape.head_dim * shape.element
        if not shape.masks:  # the scores themselves, before and after the softmax, which is in float32
            attention += shape.heads * tokens * seen * (shape.element + _FLOAT)
    else:
        # In float32: queries, what each of two parts gives, new keys and values repeated; a page of keys and values.
        page = work.block_tokens * 2 * shape.kv_heads * shape.head_dim
        attention += (6 * queries + 2 * queries + page) * _FLOAT
    mlp = held + 3 * tokens * shape.intermediate * shape.element
    logits = work.batch * shape.vocab * (shape.element + 2 * _FLOAT)  # as computed, in float32, and as sampled from
    packing = 0
    if work.packed:
        packing = 2 * tokens * (shape.kv_per_token // shape.element) * _FLOAT
    probing = _PROBE_TOKENS * shape.vocab * (shape.element + _FLOAT)
    return Activations(attention, mlp, logits, packing, probing)


def estimate_memory(shape: ModelShape, weights: WeightMemory, work: Workload, *, runtime: int = 0) -> MemoryEstimate:
    """The memory that ``work`` takes with this model."""
    reserved = request_bytes(work.context, kv_per_token=shape.kv_per_token) + shape.state_bytes
    spilled = 0
    if work.kv_bytes is not None and is_paged(shape, work):
        kv, spilled = paged_memory(shape, tokens=work.context, budget=work.kv_bytes, block_tokens=work.block_tokens)
        reserved = kv
    else:
        kv = work.context * shape.kv_per_token + shape.state_bytes if shape.on_host else reserved
    if work.stored_tokens is None:
        cache, workspaces = work.cache_bytes, min(work.workspace_bytes, MAX_IDLE * kv)
    else:
        # A chunk is in one place: what exceeds the capacity goes to a lower tier, and is not in memory any more.
        cache, workspaces = min(work.cache_bytes, work.stored_tokens * work.stored_per_token), 0
    return MemoryEstimate(
        context=work.context,
        batch=work.batch,
        weights=weights,
        kv=work.batch * kv,
        kv_reserved=work.batch * reserved,
        kv_spilled=work.batch * spilled,
        activations=activations(shape, work),
        cache=cache,
        workspaces=workspaces,
        runtime=runtime,
        host_cache=0 if shape.on_host else work.host_cache_bytes,
        disk_cache=work.disk_cache_bytes,
        on_host=shape.on_host,
    )


def shortfall(estimate: MemoryEstimate, *, kv_bytes: int, available: int) -> str | None:
    """Says so if running requests that hold ``kv_bytes`` together, with all caches full, exceed what is available."""
    peak = estimate.peak - estimate.kv + kv_bytes
    if peak <= available:
        return None
    return (
        f"with {kv_bytes / 1e9:.1f} GB of KV and all caches full this takes {peak / 1e9:.1f} GB, and there are "
        f"{available / 1e9:.1f} GB; lower kv_bytes, cache_bytes or workspace_bytes by "
        f"{(peak - available) / 1e9:.1f} GB in all"
    )


_CACHE = 0.2
_WORKSPACES = 0.2  # one sequence of 8,192 tokens of an 8B model beside its weights on 24 GB
_RUNNING = 0.4
_HOST = 0.25  # pinned memory is taken from everybody else on the machine


@dataclass(frozen=True)
class MemoryBudgets:
    """Bytes for each purpose."""

    cache_bytes: int
    workspace_bytes: int
    jobs_kv_bytes: int
    """KV that the jobs of a batch runner hold together. ``generate`` has no limit unless ``kv_bytes`` is set."""
    host_cache_bytes: int = 0


HOST_BUDGETS = MemoryBudgets(cache_bytes=2 * 2**30, workspace_bytes=2**30, jobs_kv_bytes=2 * 2**30)
"""On the CPU, where other programs use the same memory."""


def device_budgets(free: Mapping[str, int], kv_per_token: Mapping[str, int], *, host_free: int) -> MemoryBudgets:
    """Shares of the free memory of the devices that hold KV, with the bytes of one token's KV on each.

    KV grows on all devices at once, so the device that is full first sets the limit. A fifth stays free: for
    activations, for what waits to be written to slower tiers, and for the allocator.
    """
    token = sum(kv_per_token.values())
    usable = min(max(0, free[device]) * token // part for device, part in kv_per_token.items() if part)
    return MemoryBudgets(
        cache_bytes=int(_CACHE * usable),
        workspace_bytes=int(_WORKSPACES * usable),
        jobs_kv_bytes=int(_RUNNING * usable),
        host_cache_bytes=int(_HOST * max(0, host_free)),
    )
