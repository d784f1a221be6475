"""What can be converted, brought to one form: tensors with their files, metadata, and what is known to go wrong. Nothing here reads a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.convert import gguf_metadata
from edgeinfer.convert.ggml_types import PLAIN
from edgeinfer.convert.gguf_metadata import QUANTIZATION_VERSION, KeyValue
from edgeinfer.convert.gguf_names import Mapped, map_tensors
from edgeinfer.convert.gguf_write import Metadata, read_entries
from edgeinfer.convert.plan import parameter_count
from edgeinfer.convert.targets import Target
from edgeinfer.errors import BadRequest, ConversionFailed, EdgeInferError
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.gguf_header import GGUFHeader, read_header
from edgeinfer.models.safetensors import TensorInfo

# Entries of a GGUF source that are written anew or no longer hold for the result.
REPLACED = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
SPLIT = "split."
TOKENIZER = "tokenizer."


@dataclass(frozen=True)
class Source:
    """A model ready to be planned. ``hyperparameters`` is ``metadata`` without the vocabulary. ``checkpoint`` is None for a GGUF file."""

    path: Path
    name: str
    mapped: tuple[Mapped, ...]
    stored: Mapping[str, TensorInfo]
    metadata: Metadata
    hyperparameters: Metadata
    warnings: tuple[str, ...] = ()
    head_dim: int = 1
    norm_offset: float = 0.0
    checkpoint: Checkpoint | None = None

    @property
    def used(self) -> list[TensorInfo]:
        """The stored tensors that go into the file, each once."""
        return [self.stored[name] for name in dict.fromkeys(tensor.source for tensor in self.mapped if tensor.source)]


def open_source(source: Checkpoint | Path | str, target: Target, pre: str | None) -> Source:
    """Open and check ``source``. Raises `ConversionFailed` with every problem found; a file or a config that alone is wrong raises its own error."""
    if isinstance(source, Checkpoint):
        return from_checkpoint(source, target, pre)
    path = Path(source)
    if path.suffix == ".gguf" and not path.is_dir():
        if pre is not None:
            raise BadRequest(f"--pre is for Hugging Face checkpoints; {path} has its vocabulary already.")
        return from_gguf(path, target)
    return from_checkpoint(Checkpoint.inspect(path), target, pre)


def from_checkpoint(checkpoint: Checkpoint, target: Target, pre: str | None) -> Source:
    """A Hugging Face checkpoint. Its config, the weights against it, the config against llama.cpp, and the tokenizer are all looked at before
    anything is raised, each as far as it can be without what is wrong.
    """
    from edgeinfer.convert.vocab import read_vocab

    spec = checkpoint.spec
    problems = checkpoint.check() + ([] if spec is None else gguf_metadata.problems(spec))
    vocab = None
    try:
        vocab = read_vocab(checkpoint, pre=pre)
    except ConversionFailed as error:
        problems += error.problems
    except EdgeInferError as error:
        problems.append(str(error))
    if len(checkpoint.errors) == 1 and not problems:
        raise checkpoint.errors[0]
    if checkpoint.errors or problems or spec is None or vocab is None:
        raise ConversionFailed(f"{checkpoint.folder} cannot be converted:", [*checkpoint.error_problems, *problems])
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    mapped = map_tensors(spec, shapes, own_head=checkpoint.has_own_head)
    # llama.cpp recognises some tokenizers' whitespace rules by the model's name.
    name = vocab.model_name(spec.name)
    keys = gguf_metadata.general(name, file_type=target.number, parameters=parameter_count(mapped)) + gguf_metadata.hyperparameters(spec)
    hyperparameters = Metadata(spec.family, tuple(keys))
    return Source(
        path=checkpoint.folder,
        name=spec.name,
        mapped=tuple(mapped),
        stored=checkpoint.tensors,
        metadata=replace(hyperparameters, values=(*keys, *vocab.metadata())),
        hyperparameters=hyperparameters,
        warnings=(*gguf_metadata.warnings(spec), *vocab.warnings),
        head_dim=spec.head_dim,
        norm_offset=spec.norm_offset,
        checkpoint=checkpoint,
    )


def from_gguf(path: Path, target: Target) -> Source:
    """A GGUF file whose weights are all F32, F16 or BF16. Its metadata is copied as it is."""
    header = read_header(path)
    quantised = sorted({tensor.type for tensor in header.tensors.values()} - set(PLAIN))
    if quantised:
        raise ConversionFailed(
            f"{path} holds weights in {', '.join(quantised)}; quantising twice loses too much, so convert from the checkpoint or from an F16 file."
        )
    # GGUF counts dimensions from the row outward, numpy the other way round.
    mapped = tuple(Mapped(name, name, tensor.shape[::-1]) for name, tensor in header.tensors.items())
    stored = {
        name: TensorInfo(name, tensor.type, tensor.shape[::-1], tensor.file, tensor.offset, tensor.nbytes) for name, tensor in header.tensors.items()
    }
    values = (
        KeyValue("general.file_type", "u32", target.number),
        KeyValue("general.quantization_version", "u32", QUANTIZATION_VERSION),
    )

    def metadata(skipped: tuple[str, ...]) -> Metadata:
        return Metadata(header.architecture, values, read_entries(path, lambda key: key in REPLACED or key.startswith(skipped)))

    return Source(
        path=path,
        name=_bare_name(path, header),
        mapped=mapped,
        stored=stored,
        metadata=metadata((SPLIT,)),
        hyperparameters=metadata((SPLIT, TOKENIZER)),
    )


def _bare_name(path: Path, header: GGUFHeader) -> str:
    """The file's name without its type: "SmolLM2-F16.gguf" -> "SmolLM2"."""
    ending = "-" + header.quantization
    return path.stem[: -len(ending)] if path.stem.upper().endswith(ending.upper()) and len(path.stem) > len(ending) else path.stem
