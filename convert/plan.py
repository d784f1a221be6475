"""What can be known of a conversion before a byte is written: metadata, the type and size of each tensor, what falls back, what is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeinfer.convert.ggml_types import bytes_if_divisible, holds, tensor_bytes, type_ids
from edgeinfer.convert.gguf_names import Mapped
from edgeinfer.convert.gguf_write import Metadata, TensorEntry, padded, render_header
from edgeinfer.convert.report import Fallback, Kept, TypeTotal
from edgeinfer.convert.tensor_types import Choice
from edgeinfer.convert.weights import Scan
from edgeinfer.models.safetensors import TensorInfo

TOO_LARGE = "since they hold weights beyond the range of the target (65,504 in half precision)"


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file. ``stored`` is None when its values come from the config. ``type`` and ``wanted`` are type names in capitals."""

    mapped: Mapped
    stored: TensorInfo | None
    type: str
    wanted: str
    nbytes: int

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.mapped.name, self.mapped.shape, type_ids()[self.type], self.nbytes)


@dataclass(frozen=True)
class Plan:
    """A GGUF file in advance, its tensors in file order."""

    header: bytes                                        # metadata and tensor table, ready to be written
    tensors: tuple[PlannedTensor, ...]
    kept: tuple[Kept, ...]
    head_dim: int = 1                                    # of tensors whose heads are reordered
    norm_offset: float = 0.0                             # of tensors that get one

    @property
    def parameters(self) -> int:
        return parameter_count([tensor.mapped for tensor in self.tensors])

    @property
    def size(self) -> int:
        """Bytes of the finished file: the header, and each tensor with its padding."""
        return len(self.header) + sum(padded(tensor.nbytes) for tensor in self.tensors)

    @property
    def totals(self) -> tuple[TypeTotal, ...]:
        """Tensors and bytes by type, the largest first."""
        types = dict.fromkeys(tensor.type for tensor in self.tensors)
        totals = [
            TypeTotal(name, sum(t.type == name for t in self.tensors), sum(t.nbytes for t in self.tensors if t.type == name)) for name in types
        ]
        return tuple(sorted(totals, key=lambda total: -total.bytes))

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Tensors whose rows do not divide into the blocks of the type they were meant to have."""
        kept = {kept.tensor for kept in self.kept}
        return tuple(
            Fallback(t.mapped.name, t.wanted, t.type, t.mapped.shape[-1], t.nbytes - bytes_if_divisible(t.wanted, t.mapped.shape))
            for t in self.tensors
            if t.type != t.wanted and t.mapped.name not in kept
        )


def make_plan(
    metadata: Metadata,
    tensors: Sequence[Mapped],
    stored: Mapping[str, TensorInfo],
    choices: Mapping[str, Choice],
    scans: Mapping[str, Scan],
    *,
    head_dim: int = 1,
    norm_offset: float = 0.0,
) -> Plan:
    """Settle every tensor's type. One with a weight that its type would make infinite stays BF16 or F32 as stored."""
    planned, kept = [], []
    for mapped in tensors:
        source = stored.get(mapped.source)
        choice = choices[mapped.name]
        used = choice.used
        if source is not None and not holds(used, scans[mapped.source].largest):
            used = source.dtype
            kept.append(Kept(mapped.name, used, TOO_LARGE))
        planned.append(PlannedTensor(mapped, source, used, choice.wanted, tensor_bytes(used, mapped.shape)))
    header = render_header(metadata, [tensor.entry for tensor in planned])
    return Plan(header, tuple(planned), tuple(kept), head_dim, norm_offset)


def parameter_count(tensors: Sequence[Mapped]) -> int:
    """Numbers in all tensors that the checkpoint stores."""
    return sum(math.prod(tensor.shape) for tensor in tensors if not tensor.values)
