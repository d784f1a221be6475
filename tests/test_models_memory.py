"""The memory estimate against what llama.cpp allocates."""

from __future__ import annotations

import re
from pathlib import Path

import mutate
import pytest
from tiny import tiny

from edgeinfer.errors import BadRequest, ModelDamaged
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.ggml_types import BY_NAME
from edgeinfer.models.gguf_header import read_header
from edgeinfer.models.memory import KV_TYPES, _group_memory, attention_depth, available_memory, estimate, format_bytes, kv_bytes_per_token, parse_bytes
from edgeinfer.models.native import NativeModel, captured_logs, llama

TYPE_NUMBERS = {"f16": 1, "q8_0": 8, "q4_0": 2}
MIB = 2**20


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path):
    model = NativeModel(smollm2_gguf)
    yield model
    model.close()


def allocated(model: NativeModel, *, ctx: int, n_seq: int, kv: str, n_ubatch: int, n_outputs: int, flash: bool, unified: bool) -> tuple[float, float]:
    """(MiB of KV cache, MiB of compute buffers) that llama.cpp logs when it makes such a context."""
    lib = llama()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch, params.n_outputs_max = ctx, n_seq, max(ctx, n_ubatch), n_ubatch, n_outputs
    params.type_k = params.type_v = TYPE_NUMBERS[kv]
    params.flash_attn_type, params.kv_unified = int(flash), unified
    with captured_logs() as lines:
        context = lib.llama_init_from_model(model.handle, params)
    assert context
    lib.llama_free(context)
    log = "".join(lines)

    def total(pattern: str) -> float:
        found = re.findall(pattern + r" buffer size =\s+([\d.]+) MiB", log)
        assert found, log
        return sum(map(float, found))

    return total("KV"), total("compute")


@pytest.mark.parametrize(("ctx", "n_seq", "kv", "n_ubatch", "n_outputs", "flash", "unified"), [
    (512, 1, "f16", 512, 512, True, True),
    (2048, 1, "f16", 512, 512, True, True),
    (2000, 4, "f16", 512, 4, True, True),
    (8192, 4, "q8_0", 256, 4, True, True),
    (2048, 16, "q4_0", 512, 16, True, True),
    (4096, 1, "f16", 512, 1, False, True),
    (16384, 2, "f16", 128, 128, True, True),
    (100, 1, "f16", 512, 1, True, True),
    (8192, 42, "f16", 512, 48, True, True),
    (8192, 4, "f16", 512, 36, True, False),
    (4 * 1100, 4, "f16", 512, 36, False, False),
])
def test_agrees_with_llama_cpp(
    smollm2: NativeModel, smollm2_gguf: Path, ctx: int, n_seq: int, kv: str, n_ubatch: int, n_outputs: int, flash: bool, unified: bool
) -> None:
    real_kv, real_compute = allocated(smollm2, ctx=ctx, n_seq=n_seq, kv=kv, n_ubatch=n_ubatch, n_outputs=n_outputs, flash=flash, unified=unified)
    ours = estimate(
        read_header(smollm2_gguf), ctx=ctx, n_seq=n_seq, kv_type_k=kv, kv_type_v=kv, n_ubatch=n_ubatch, n_outputs=n_outputs, flash_attention=flash,
        kv_unified=unified,
    )
    assert ours.kv / MIB == pytest.approx(real_kv, abs=0.006)                # the log rounds to hundredths
    assert real_compute / 1.5 < ours.compute / MIB < real_compute * 1.5
    assert ours.total == ours.weights + ours.kv + ours.compute


def test_weights_are_what_llama_cpp_maps(smollm2: NativeModel, smollm2_gguf: Path) -> None:
    (mapped,) = re.findall(r"CPU_Mapped model buffer size =\s+([\d.]+) MiB", smollm2.load_log)
    assert read_header(smollm2_gguf).weight_bytes / MIB == pytest.approx(float(mapped), abs=0.006)


def test_bytes_per_token_by_type(smollm2_gguf: Path) -> None:
    header = read_header(smollm2_gguf)
    assert kv_bytes_per_token(header) == 30 * 2 * 192 * 2                    # layers x (K, V) x 3 heads of 64 x 2 bytes
    assert kv_bytes_per_token(header, type_k="q8_0", type_v="q4_0") == 30 * (192 // 32 * 34 + 192 // 32 * 18)
    assert all(kind.upper() in BY_NAME for kind in KV_TYPES)


def test_a_spec_and_its_file_agree(tmp_path: Path) -> None:
    spec = Checkpoint.open(tiny(tmp_path / "model", "llama")).spec
    header = read_header(mutate.tiny_gguf(tmp_path / "tiny.gguf"))
    assert kv_bytes_per_token(spec) == spec.layers * spec.kv_heads * spec.head_dim * 2 * 2
    assert kv_bytes_per_token(header) == 2 * 2 * 16 * 2 * 2
    expected = sum(t.nbytes for t in Checkpoint.open(tmp_path / "model").tensors.values())
    norms = (2 * spec.layers + 1) * spec.hidden
    assert estimate(spec, ctx=256).weights == expected + 2 * norms           # stored in bf16, and norms will be float32


def test_windows_bound_the_cache_only_when_asked(tmp_path: Path) -> None:
    spec = Checkpoint.open(tiny(tmp_path, "gemma3", layers=7)).spec
    full = estimate(spec, ctx=8192, n_ubatch=64)
    small = estimate(spec, ctx=8192, n_ubatch=64, swa_full=False)
    layer = spec.kv_heads * spec.head_dim * 2 * 2
    assert full.kv == 7 * 8192 * layer
    assert small.kv == (8192 + 6 * 256) * layer                              # one full layer; a window of 32 plus a batch of 64, rounded up to 256
    assert "see 32 tokens only" in full.notes[0]
    assert "cannot be reused" in small.notes[0]
    assert estimate(spec, ctx=100).notes == ()


def test_arguments_that_cannot_be() -> None:
    for name in ("f8", "", "Q9_0", "mxfp4"):
        with pytest.raises(BadRequest, match="no KV cache type"):
            kv_bytes_per_token(_spec(), type_k=name)
    with pytest.raises(BadRequest, match="ctx must be 1 or more"):
        estimate(_spec(), ctx=0)
    with pytest.raises(BadRequest, match="heads have 8 values.* 32 at a time; use -ctk f16"):
        kv_bytes_per_token(_spec(head_dim=8), type_k="q8_0")


def _spec(head_dim: int = 16):
    from edgeinfer.models.config import spec_from_config

    return spec_from_config({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 1, "head_dim": head_dim, "vocab_size": 500,
    })


def test_a_header_without_dimensions_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bare.gguf").write_bytes(mutate.header(keys=1) + mutate.key(b"general.architecture", mutate.STRING, mutate.text(b"llama")))
    with pytest.raises(ModelDamaged, match=r"'llama\.block_count'"):
        estimate(read_header(tmp_path / "bare.gguf"), ctx=256)


@pytest.mark.parametrize(("text", "size"), [
    (1, 1), ("1000", 1000), ("2GiB", 2 << 30), ("2G", 2 << 30), ("2gb", 2_000_000_000), ("1.5 MiB", 3 << 19), ("512 K", 512 << 10), ("3B", 3), (" 1T ", 1 << 40),
])
def test_sizes_as_users_write_them(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [0, -1, True, "", "GiB", "-1G", "1e9", "2 giga", "iB", "3iB", "0", "1.5.2G", None, 2.5, "0.1"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(BadRequest, match="no amount of memory"):
        parse_bytes(text)                                # type: ignore[arg-type]


def test_sizes_for_people() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 1536, 3 << 20, 250 << 20, 5 << 30)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "3.0 MiB", "250 MiB", "5.0 GiB",
    ]


def test_a_container_has_what_its_control_group_allows(tmp_path: Path) -> None:
    new, old, none, free, over = (tmp_path / name for name in ("new", "old", "none", "free", "over"))
    for folder in (new, old / "memory", none, free, over):
        folder.mkdir(parents=True)
    for folder, limit, used in ((new, "5000", "3500"), (free, "max", "3500"), (over, "1000", "1500")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 300\nactive_file 7\n")
    (old / "memory" / "memory.limit_in_bytes").write_text("5000\n")
    (old / "memory" / "memory.usage_in_bytes").write_text("4000\n")
    (old / "memory" / "memory.stat").write_text("inactive_file 100\ntotal_inactive_file 250\n")
    assert _group_memory(new) == 1800 and _group_memory(old) == 1250 and _group_memory(over) == 0
    assert _group_memory(free) == _group_memory(none) > 2**60
    assert 2**20 < available_memory() < 2**60


def test_attention_takes_half_of_a_token_at_two_thirds_of_the_context_where_operations_are_equal(smollm2_gguf: Path) -> None:
    parameters = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576) + 576          # all but the embeddings
    equal = 2 * parameters / (30 * 4 * 9 * 64)
    assert attention_depth(read_header(smollm2_gguf)) == int(equal * 2 / 3)
