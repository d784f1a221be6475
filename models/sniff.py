"""Says what a file that is not a model is instead, from its first bytes."""

from __future__ import annotations

SIGNATURES = (
    (b"version https://git-lfs", "a Git LFS pointer, so fetch the real file with `git lfs pull`"),
    (b"PK\x03\x04", "a ZIP archive (perhaps PyTorch weights)"),
    (b"\x1f\x8b", "gzip-compressed"),
    (b"(\xb5/\xfd", "zstd-compressed"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "a program"),
    (b"lmgg", "a GGML file, a format older than GGUF"),
    (b"fmgg", "a GGML file, a format older than GGUF"),
    (b"tjgg", "a GGML file, a format older than GGUF"),
    (b"algg", "a GGML file, a format older than GGUF"),
    (b"GGUF", "a GGUF file"),
)


def describe(start: bytes) -> str:
    """A noun phrase for a file that begins with ``start`` (some hundred bytes are enough)."""
    if not start:
        return "empty"
    for signature, what in SIGNATURES:
        if start.startswith(signature):
            return what
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return "a safetensors file; convert it with `edgeinfer convert`"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"<":
        return "an HTML page" if b"<html" in text.lower() or b"<!doctype html" in text.lower() else "an XML document"
    if not any(start):
        return "filled with zeros (an interrupted download or a full disk)"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in start):
        return "JSON text" if text[:1] in (b"{", b"[") else "text"
    return "of an unknown binary kind"
