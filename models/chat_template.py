"""The one door to jinja2: rendering a model's chat template.

A template is code from whoever made the model file, so it runs in jinja2's immutable sandbox under a `Budget`, and sees what Hugging Face's
``apply_chat_template`` gives its templates (trim_blocks, lstrip_blocks, loop controls, ``generation`` blocks, ``tojson``, ``strftime_now``,
``raise_exception``, ``bos_token``, ``eos_token``). There is no built-in format to fall back to: a template that fails is an error, never another
prompt.

jinja2 alone bounds only range(). The rest is done to the parsed template before it is compiled: loop bodies, list literals and ``~`` get a counting
call, and filters, tests, calls and the operators that can grow their operands are counted or refused by size.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from edgeinfer.errors import BadRequest, ChatTemplateError
from edgeinfer.models.chat_messages import MARKS, normalise_messages
from edgeinfer.models.template_budget import Budget, check_brace_format, check_percent_format, check_replace

MAX_SOURCE = 1_000_000                    # characters of template source
_RESERVED = frozenset({"messages", "bos_token", "eos_token"})
_PROBE = "edgeinfer-system-probe"

# The methods of strings that templates use. Those that pad to a width, encode or translate are left out: they make much from little.
_STRING_METHODS = frozenset(
    "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper join "
    "lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase "
    "title upper".split()
)
# What ensure_ascii escapes. The marks are spared, so that the caller finds them.
_ESCAPED = re.compile(rf"[^\x00-\x7f{MARKS[0]}-{MARKS[-1]}]")
_GROWING_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "urlize", "wordwrap", "xmlattr"})
# Names that no template can write, so that none can call or shadow them.
_STEP, _MADE, _CONCAT = "step!", "made!", "concat!"


class ChatTemplate:
    """A compiled chat template. Safe to use from any thread.

    bos_text, eos_text: what ``bos_token`` and ``eos_token`` print; "" leaves them undefined, as for a tokenizer that has none.
    Raises `ChatTemplateError` when there is no template (``source`` None or empty) or it does not compile.
    """

    def __init__(self, source: str | None, *, bos_text: str = "", eos_text: str = ""):
        if not source:
            raise ChatTemplateError(
                "This model has no chat template, so it cannot chat; continue raw prompts instead (--raw, or generate() in a program), or pass a "
                "template with --chat-template."
            )
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"The model's chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are accepted.")
        self.source = source
        self._tokens = {name: text for name, text in (("bos_token", bos_text), ("eos_token", eos_text)) if text}
        self._template = _running(lambda: _compile(source))

    def render(
        self, messages: Iterable[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, tools: list[Any] | None = None, **kwargs: Any
    ) -> str:
        """The prompt text for ``messages`` (normalised by `normalise_messages` first).

        System messages: a template that refuses or ignores them (found out once, by rendering a probe) gets the leading ones merged into the first
        user turn, separated by an empty line. "developer" is the system role for templates that do not mention it.
        kwargs: further variables of the template, e.g. ``enable_thinking``.
        Raises `ChatTemplateError` with the template's own message when it refuses, fails, or exceeds its budget, and `BadRequest` for malformed
        messages.
        """
        taken = _RESERVED.intersection(kwargs)
        if taken:
            raise BadRequest(f"{min(taken)!r} is set by the chat itself and cannot be a template option.")
        normal = normalise_messages(messages)
        if "developer" not in self.source:
            normal = [{**message, "role": "system"} if message["role"] == "developer" else message for message in normal]
        if normal[0]["role"] == "system" and not self.takes_system:
            normal = _merge_system(normal)
        return self._render(normal, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether the template prints a leading system message."""
        user = {"role": "user", "content": "x"}
        try:
            return _PROBE in self._render([{"role": "system", "content": _PROBE}, user])
        except ChatTemplateError:
            try:
                self._render([user])
            except ChatTemplateError:
                return True                                 # it fails on the probe itself: nothing is known, so nothing is changed
            return False

    def _render(self, messages: list[dict[str, Any]], /, add_generation_prompt: bool = True, tools: list[Any] | None = None, **kwargs: Any) -> str:
        variables = {
            "documents": None, **self._tokens, **kwargs,
            "messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt,
        }
        return _running(lambda: "".join(self._template.generate(variables)))


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system, rest = messages[:count], messages[count:]
    if not rest or rest[0]["role"] != "user":
        return messages                                     # no user turn to merge into: the template says what it thinks of that
    texts = [message["content"] for message in (*system, rest[0]) if message["content"]]
    return [{**rest[0], "content": "\n\n".join(texts)}, *rest[1:]]


# ------------------------------------------------------------------------------------------------------------- environment

_local = threading.local()


class _Refused(jinja2.TemplateError):
    """raise_exception() was called."""


def _running(work: Callable[[], Any]) -> Any:
    """Compile or render under a fresh budget; whatever goes wrong becomes a `ChatTemplateError`."""
    _local.budget = Budget()
    try:
        return work()
    except ChatTemplateError:
        raise
    except _Refused as error:
        raise ChatTemplateError(f"The model's chat template refuses these messages: {error.message}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"The model's chat template has a syntax error in line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise ChatTemplateError(f"The model's chat template tried something that is not allowed: {error.message}") from error
    except Exception as error:                              # foreign code: it can raise anything that Python can
        reason = str(error) or type(error).__name__
        raise ChatTemplateError(f"The model's chat template failed: {reason}") from error
    finally:
        del _local.budget


def _budget() -> Budget:
    return _local.budget


def _compile(source: str) -> jinja2.Template:
    environment = _environment()
    tree = _Counting().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.template_class.from_code(environment, environment.compile(tree), environment.make_globals(None))


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        finalize=_printed,
        optimized=False,                                    # folding constants would run the template's operators unguarded
    )
    environment.filters["tojson"] = _tojson
    for table in (environment.filters, environment.tests):
        for name, function in table.items():
            table[name] = _guarded(name, function)
    environment.filters.update({_STEP: _step, _MADE: lambda value: _budget().made(value), _CONCAT: _concat})
    del environment.globals["lipsum"]
    environment.globals.update(namespace=_Namespace, raise_exception=_raise_exception, strftime_now=lambda format: datetime.now().strftime(format))
    return environment


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<namespace>"                                # its values may refer back to it


def _raise_exception(message: str) -> None:
    raise _Refused(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes HTML characters, which is not what models were trained on.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _printed(value: Any) -> Any:
    return _budget().made(value)


def _step(characters: int) -> bool:
    _budget().step(characters)
    return True


def _concat(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _budget().spend(sum(map(len, texts)))
    return "".join(texts)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that counts itself and what it makes, and refuses to grow something small into something huge."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)                              # keeps jinja_pass_arg, by which jinja2 knows to pass its context
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _budget().step()
        value, rest = args[skipped] if len(args) > skipped else "", (*args[skipped + 1:], *kwargs.values())
        if name in _GROWING_FILTERS:
            _budget().growth(value, rest)
        elif name == "replace" and len(rest) >= 2:
            check_replace(str(value), str(rest[0]), str(rest[1]))
        elif name == "format":
            check_percent_format(str(value))
        elif name == "join":
            value = _budget().made(list(value))             # may be a generator, whose length nobody knows yet
            _budget().growth(value, rest)
            args = (*args[:skipped], value, *args[skipped + 1:])
        return _budget().made(function(*args, **kwargs))

    return guarded


class _Generation(Extension):
    """``{% generation %}`` marks text that the model wrote, for training. Rendering needs no mark: the body stays as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(NodeTransformer):
    """Puts the budget into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        printed = sum(len(data.data) for statement in node.body for data in statement.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(printed), _STEP, node.lineno), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_filter(nodes.Const(0), _STEP, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _MADE, node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _MADE, node.lineno) if node.ctx == "load" else node


def _filter(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        budget.binary(operator, left, right)
        value = super().call_binop(context, operator, left, right)
        return value if operator == "+" and isinstance(value, str) else budget.made(value)     # the text was counted before it was made

    def call(__self, __context: Context, __callee: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805 - as in jinja2: any keyword may follow
        budget = _budget()
        budget.step()
        text = getattr(getattr(__callee, "__wrapped__", __callee), "__self__", None)
        if isinstance(text, str):
            name = __callee.__name__
            if name in ("format", "format_map"):
                check_brace_format(text)
            elif name == "replace" and len(args) >= 2:
                check_replace(text, str(args[0]), str(args[1]))
            elif name == "join" and args:
                args = (budget.made(list(args[0])), *args[1:])
                budget.growth(args[0], (text,))
        return budget.made(super().call(__context, __callee, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        if isinstance(obj, (bytes, int, float)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # jinja2 returns a value that only complains when used, and prints as nothing.
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")
