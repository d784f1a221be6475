"""What a conversion did, or would do: the value `convert` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TypeTotal:
    """All tensors of one type."""

    type: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Fallback:
    """One tensor whose rows do not divide into the blocks of the type it was meant to have. ``extra_bytes`` is what the replacement costs."""

    tensor: str
    wanted: str
    used: str
    row: int
    extra_bytes: int


@dataclass(frozen=True)
class Kept:
    """One tensor left in the checkpoint's own type, and why."""

    tensor: str
    type: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """The outcome. Sizes in bytes, durations in seconds. ``output`` was not written when ``dry_run``; ``bytes`` is its exact size in both cases."""

    source: Path
    output: Path
    target: str
    bytes: int
    source_bytes: int
    parameters: int
    tensors: tuple[TypeTotal, ...]
    dry_run: bool = False
    fallbacks: tuple[Fallback, ...] = ()
    kept: tuple[Kept, ...] = ()
    checks: tuple[str, ...] = ()                         # what was tested on the finished file
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0                           # of the process so far, conversion included

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data for each parameter."""
        return 8 * sum(total.bytes for total in self.tensors) / max(1, self.parameters)

    @property
    def fallback_bytes(self) -> int:
        return sum(fallback.extra_bytes for fallback in self.fallbacks)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = asdict(self) | {"source": str(self.source), "output": str(self.output)}
        return values | {"bits_per_weight": round(self.bits_per_weight, 4), "fallback_bytes": self.fallback_bytes}

    def summary(self) -> str:
        """A few lines for people."""
        verb = "Would write" if self.dry_run else "Wrote"
        lines = [f"{verb} {self.output}: {self.bytes:,} bytes ({megabytes(self.bytes)}), {self.target}, {self.bits_per_weight:.2f} bits per weight."]
        lines.append("Tensors: " + ", ".join(f"{total.tensors} x {total.type} ({megabytes(total.bytes)})" for total in self.tensors) + ".")
        lines += self._fallback_lines()
        for reason in dict.fromkeys(kept.reason for kept in self.kept):
            names = [f"{kept.tensor} ({kept.type})" for kept in self.kept if kept.reason == reason]
            lines.append(f"Kept as stored, {reason}: {', '.join(names)}.")
        if self.checks:
            lines.append("Checked: " + ", ".join(self.checks) + ".")
        lines += [f"Note: {warning}" for warning in self.warnings]
        if self.seconds:
            stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())
            lines.append(f"{sum(self.seconds.values()):.1f} s ({stages}), at most {megabytes(self.peak_memory_bytes)} of memory.")
        return "\n".join(lines)

    def _fallback_lines(self) -> list[str]:
        groups: dict[tuple[str, str, int], list[Fallback]] = {}
        for fallback in self.fallbacks:
            groups.setdefault((fallback.wanted, fallback.used, fallback.row), []).append(fallback)
        lines = []
        for (wanted, used, row), members in groups.items():
            extra = sum(member.extra_bytes for member in members)
            who = members[0].tensor if len(members) == 1 else f"{len(members)} tensors"
            lines.append(f"Fell back: {who} from {wanted} to {used}, since rows of {row} do not divide into its blocks: {_more(extra)}.")
        if len(lines) > 1:
            lines.append(f"All fallbacks together: {len(self.fallbacks)} tensors, {_more(self.fallback_bytes)}.")
        return lines


def _more(extra: int) -> str:
    return f"{abs(extra):,} bytes {'more' if extra >= 0 else 'less'}"


def megabytes(size: int) -> str:
    """Decimal megabytes: "105.4 MB"."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
