"""Everything edgeinfer raises on purpose.

    EdgeInferError                      code                      exit status
    ├── BadRequest                      bad_request               2
    │   ├── ContextLengthExceeded       context_length_exceeded   2
    │   ├── UnsupportedParameter        unsupported_parameter     2
    │   └── ChatTemplateError           chat_template_error       2
    ├── ModelNotFound                   model_not_found           2
    ├── ModelDamaged                    model_damaged             1
    ├── UnsupportedModel                unsupported_model         2
    ├── ConversionFailed                conversion_failed         1
    │   └── GateFailed                  gate_failed               3
    ├── OutOfMemory                     out_of_memory             1
    ├── DeviceUnavailable               device_unavailable        2
    ├── EngineBusy                      engine_busy               1
    ├── EngineClosed                    engine_closed             1
    ├── BackendFailed                   backend_failed            1
    ├── ServerFailed                    server_failed             1
    │   └── ServerUnreachable           server_unreachable        1
    └── Cancelled                       cancelled                 130

The message is one sentence (a list of problems may follow it) that names the thing and the way out. ``code`` is stable: servers, scripts and
embedders branch on it, never on the text. ``exit_status`` is what the command line returns: 1 the work failed, 2 the request was wrong,
3 a quality gate failed, 130 interrupted.
"""

from __future__ import annotations


class EdgeInferError(Exception):
    """Root of the tree: ``except EdgeInferError`` catches all that this package raises on purpose."""

    code = "error"
    exit_status = 1


class BadRequest(EdgeInferError):
    """The caller asked for something malformed: an unknown role, a negative temperature, a name that means nothing."""

    code = "bad_request"
    exit_status = 2


class ContextLengthExceeded(BadRequest):
    """The prompt does not fit. ``needed`` and ``available`` are token counts."""

    code = "context_length_exceeded"

    def __init__(self, needed: int, available: int, hint: str = "Shorten the conversation or load the model with a larger --ctx-size."):
        super().__init__(f"The prompt has {needed:,} tokens and the context holds {available:,}. {hint}")
        self.needed = needed
        self.available = available


class UnsupportedParameter(BadRequest):
    """The parameter is well formed, but the loaded engine or model cannot honour it."""

    code = "unsupported_parameter"


class ChatTemplateError(BadRequest):
    """The model's chat template refused the messages, or is itself broken. The text carries the template's own message."""

    code = "chat_template_error"


class ModelNotFound(EdgeInferError):
    """No file, folder, store entry, catalogue name or hub repository answers to the name."""

    code = "model_not_found"
    exit_status = 2


class ModelDamaged(EdgeInferError):
    """The file exists and is not a whole, well-formed model."""

    code = "model_damaged"


class UnsupportedModel(EdgeInferError):
    """A well-formed model of a kind (architecture, rope type, activation, tokenizer) that edgeinfer does not know."""

    code = "unsupported_model"
    exit_status = 2


class ConversionFailed(EdgeInferError):
    """A conversion stopped. Nothing was left under the final name. ``problems`` lists every cause that was found."""

    code = "conversion_failed"

    def __init__(self, message: str, problems: tuple[str, ...] | list[str] = ()):
        self.problems = tuple(problems)
        super().__init__("\n  - ".join([message, *self.problems]))


class GateFailed(ConversionFailed):
    """The artefact was made, measured, found below the asked quality, and removed."""

    code = "gate_failed"
    exit_status = 3


class OutOfMemory(EdgeInferError):
    """Weights, KV cache or compute buffers do not fit in memory."""

    code = "out_of_memory"


class DeviceUnavailable(EdgeInferError):
    """A device was required (``--device cuda``, ``-ngl all``) and this machine or build does not have it."""

    code = "device_unavailable"
    exit_status = 2


class EngineBusy(EdgeInferError):
    """The queue is full. Retrying later is the right answer."""

    code = "engine_busy"


class EngineClosed(EdgeInferError):
    """The engine was closed before or while the request ran."""

    code = "engine_closed"


class BackendFailed(EdgeInferError):
    """llama.cpp or ONNX Runtime reported a failure, or produced logits that are not numbers."""

    code = "backend_failed"


class ServerFailed(EdgeInferError):
    """A server that was asked over HTTP broke off, went silent, or sent what is no HTTP."""

    code = "server_failed"


class ServerUnreachable(ServerFailed):
    """No connection to the server could be made at all."""

    code = "server_unreachable"


class Cancelled(EdgeInferError):
    """The work was cancelled by its owner."""

    code = "cancelled"
    exit_status = 130
