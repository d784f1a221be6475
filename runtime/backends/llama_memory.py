"""How large a context is made, and whether it fits: decided from the header and the options, before llama.cpp is asked for anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgeinfer.errors import BadRequest, OutOfMemory
from edgeinfer.models.gguf_header import GGUFHeader, read_header
from edgeinfer.models.memory import CELLS, MemoryEstimate, available_memory, estimate, format_bytes, kv_bytes_per_token, parse_bytes
from edgeinfer.runtime.backends.llama_lora import check_adapter, parse_lora
from edgeinfer.runtime.backends.llama_options import DEFAULT_CONTEXT, LlamaOptions, flash_attention, gpu_layers


def context_size(header: GGUFHeader, options: LlamaOptions, notices: list[str]) -> int:
    """Positions one sequence may use."""
    said = header.get("context_length")
    trained = said if isinstance(said, int) and said > 0 else DEFAULT_CONTEXT
    n_ctx = options.ctx_size or min(trained, DEFAULT_CONTEXT)
    if n_ctx > trained and "position_embd.weight" in header.tensors:     # llama.cpp ends the process over a position that the table lacks
        raise BadRequest(f"--ctx-size {n_ctx} is more than the {trained} positions that {header.path.name} has learned; lower it.")
    if n_ctx > trained:
        notices.append(f"A context of {n_ctx:,} tokens was asked for; this model was trained for {trained:,}, and answers get worse beyond.")
    return n_ctx


def choose_layout(header: GGUFHeader, options: LlamaOptions, n_ctx: int) -> LlamaOptions:
    """``options`` with ``kv_unified`` decided.

    Sequences with KV cells of their own are computed faster, since nobody's attention has to step over the cells of others; but each takes all of its
    context's memory from the start. They get their own where that is at most 1/8 of the memory available and no budget was set.
    """
    if options.kv_unified is not None:
        return options
    apart = replace(options, kv_unified=False)
    needed = apart.slots * n_ctx * kv_bytes_per_token(header, type_k=options.cache_type_k, type_v=options.cache_type_v)
    own = not options.kv_size and options.max_memory is None and (apart.slots == 1 or needed <= available_memory() // 8)
    return apart if own else replace(options, kv_unified=True)


def kv_cells(options: LlamaOptions, n_ctx: int) -> int:
    """Tokens that all sequences together hold."""
    if not options.kv_unified:
        if options.kv_size:
            raise BadRequest("kv_size is the size of a shared KV cache (kv_unified); without one every sequence has --ctx-size tokens.")
        return n_ctx * options.slots
    cells = options.kv_size or n_ctx
    if cells < n_ctx:
        raise BadRequest(f"The KV cache of {cells} tokens is smaller than the context of {n_ctx}; raise it or lower --ctx-size.")
    return cells


def output_rows(options: LlamaOptions) -> int:
    """Rows of logits one native call may return: for every sequence and every drafted token, and never fewer than n_seq_max."""
    return max(options.slots, options.parallel + options.max_draft_rows)


def long_rope(header: GGUFHeader, n_ctx: int) -> bool:
    """Whether positions are rotated by the factors for long contexts, which models that have two sets choose by the size of the context."""
    original = header.get("rope.scaling.original_context_length")
    return "rope_factors_long.weight" in header.tensors and isinstance(original, int) and n_ctx > original


def load_estimate(header: GGUFHeader, options: LlamaOptions, n_ctx: int, flash: int, adapter_bytes: int) -> MemoryEstimate:
    """The memory that loading with these options takes, their layout decided."""
    found = estimate(
        header,
        ctx=kv_cells(options, n_ctx),
        n_seq=options.slots,
        kv_type_k=options.cache_type_k,
        kv_type_v=options.cache_type_v,
        n_ubatch=min(options.ubatch_size, options.batch_size),
        n_outputs=output_rows(options),
        flash_attention=flash != 0,
        kv_unified=bool(options.kv_unified),
    )
    logits = 4 * output_rows(options) * header.vocab_size                # where they lie after the graph's own buffers are used again
    return replace(found, weights=found.weights + adapter_bytes, compute=found.compute + logits)


def memory_needed(path: Path, options: LlamaOptions) -> MemoryEstimate:
    """What loading would take by the file's header, whether there is so much or not. Raises as loading would for a file or options that are wrong."""
    header = read_header(path)
    adapters = [check_adapter(spec, header) for spec in parse_lora(options.lora)]
    n_ctx = context_size(header, options, [])
    options = choose_layout(header, options, n_ctx)
    flash = flash_attention(options, gpu_layers(options, []), [])
    return load_estimate(header, options, n_ctx, flash, sum(adapter.weight_bytes for adapter in adapters))


def check_memory(
    header: GGUFHeader, options: LlamaOptions, n_ctx: int, flash: int, gpu_layers: int, adapter_bytes: int, notices: list[str],
) -> MemoryEstimate:
    """The memory that loading will take. Raises `OutOfMemory` when that is more than ``max_memory`` or than this machine can give."""

    def needed(ctx: int) -> MemoryEstimate:
        at_ctx = replace(options, ctx_size=ctx, kv_size=options.kv_size if ctx == n_ctx else 0)
        return load_estimate(header, at_ctx, ctx, flash, adapter_bytes)

    need = needed(n_ctx)
    if options.max_memory is not None:
        budget = parse_bytes(options.max_memory)
        if need.total > budget:
            raise OutOfMemory(_refusal(header, options, need, n_ctx, f"max_memory allows {format_bytes(budget)}", lambda ctx: needed(ctx).total <= budget))
    if gpu_layers == 0:
        available = available_memory()
        # Mapped weights are the file's pages in the system's cache, which can be dropped and read again: slow, but no reason to refuse.
        certain = 0 if options.mmap else need.weights
        if certain + need.kv + need.compute > available:
            fits = f"this machine has {format_bytes(available)} available"
            raise OutOfMemory(_refusal(header, options, need, n_ctx, fits, lambda ctx: certain + needed(ctx).kv + needed(ctx).compute <= available))
        if need.total > available:
            notices.append(
                f"The weights, {format_bytes(need.weights)}, do not fit beside the KV cache into the {format_bytes(available)} of memory that are available: expect them "
                "to be read from disk again and again."
            )
    return need


def _refusal(header: GGUFHeader, options: LlamaOptions, need: MemoryEstimate, n_ctx: int, limit: str, fits: Callable[[int], bool]) -> str:
    smaller = n_ctx // 2
    while smaller >= CELLS and not fits(smaller):
        smaller //= 2
    way_out = f"--ctx-size {smaller} would fit" if smaller >= CELLS else "no context would fit: take a smaller model or a smaller quantisation"
    if options.cache_type_k == options.cache_type_v == "f16":
        way_out += ", and -ctk q8_0 -ctv q8_0 would halve the KV cache"
    return (
        f"{header.path.name} needs {format_bytes(need.total)} (weights {format_bytes(need.weights)}, KV cache {format_bytes(need.kv)} for a context of {n_ctx:,} tokens, "
        f"compute buffers {format_bytes(need.compute)}), and {limit}; {way_out}."
    )
