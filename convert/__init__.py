"""A Hugging Face checkpoint in, a tested GGUF file out. See docs/conversion.md."""

from edgeinfer.convert.pipeline import convert
from edgeinfer.convert.report import ConversionReport

__all__ = ["ConversionReport", "convert"]
