"""Command-line arguments -> a call of a Python function.

The parameters of a command's function are its arguments: positional-only ones are words, keyword-only ones are flags,
and the fields of a dataclass are flags too. A parameter of type `Settings` stands for every field of a run's `Config`.
Help texts are the `Args` of the docstring, the text of an `Annotated` type, or the comments of the fields. Errors are
one line.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from plainvit.commands.parsing import PixelFlags, exit_with_error
from plainvit.config import Config

HELP, HELP_ALL = ("-h", "--help"), "--help-all"


class Settings(dict[str, Any]):
    """The settings of a run that were given as flags, by dotted name: {"batch": 64, "optim.lr": 1e-3}."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One argument of a command."""

    name: str  # as in Python, dotted below a dataclass: optim.lr_end
    kind: type
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    required: bool = False
    is_word: bool = False
    is_setting: bool = False
    help: str = ""

    @property
    def option(self) -> str:
        """--image-size for image_size; --for for a parameter for_, as `for` is a word of Python."""
        return f"--{self.name.rstrip('_').replace('_', '-')}"

    @property
    def metavar(self) -> str | None:
        """MODEL, [PATTERN], CARD ... for words; the type of a flag's value."""
        if self.is_word:
            is_single = self.nargs in (None, "?")
            name = self.name.upper() if is_single else f"{self.name.upper().removesuffix('S')} ..."
            return name if self.required else f"[{name}]"
        if self.name == "model":
            return "NAME"
        if self.choices:
            return f"{{{','.join(map(str, self.choices))}}}"
        return self.kind.__name__.upper()

    def add_to(self, parser: "argparse._ActionsContainer") -> None:
        """Add it to a parser; a flag that is not given leaves no value."""
        if self.kind is bool:
            self._add_switches(parser)
            return
        options: dict[str, Any] = {"metavar": self.metavar, "type": self.kind, "choices": self.choices}
        options["help"] = self._describe().replace("%", "%%")
        if self.is_word:
            parser.add_argument(self.name, nargs=self.nargs, **options)
            return
        nargs = "+" if self.nargs == "*" and not self.is_setting else self.nargs  # a setting of a recipe can be emptied
        options |= {"dest": self.name, "default": argparse.SUPPRESS, "required": self.required, "nargs": nargs}
        parser.add_argument(self.option, **options)

    def _add_switches(self, parser: "argparse._ActionsContainer") -> None:
        """--model.class-token, and for settings --model.no-class-token; help shows what changes the default."""
        text = self.help.replace("%", "%%")
        is_on = self.default is True
        turn_on = argparse.SUPPRESS if is_on else text
        turn_off = f"Turn off: {text[:1].lower()}{text[1:]}" if is_on else argparse.SUPPRESS
        options: dict[str, Any] = {"action": "store_const", "dest": self.name, "default": argparse.SUPPRESS}
        parser.add_argument(self.option, const=True, help=turn_on, **options)
        if self.is_setting:
            group, dot, name = self.option[2:].rpartition(".")
            parser.add_argument(f"--{group}{dot}no-{name}", const=False, help=turn_off, **options)

    def _describe(self) -> str:
        if self.is_word:
            return self.help
        if self.required:
            return f"{self.help} (required)"
        if not self.default:
            return self.help
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        return f"{self.help} (default: {shown})"


# Flags ----------------------------------------------------------------------------------------------------------------


def list_flags(call: Callable[..., Any], config: Config | None = None) -> list[Flag]:
    """The arguments of a command; settings of a run have the values of `config` as defaults."""
    flags: dict[str, Flag] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        for flag in _list_parameter(call, name, parameter, config):
            flags.setdefault(flag.name, flag)  # a ViT and a ResNet share settings
    return list(flags.values())


def _list_parameter(
    call: Callable[..., Any], name: str, parameter: inspect.Parameter, config: Config | None
) -> Iterator[Flag]:
    hint, required = parameter.annotation, parameter.default is parameter.empty
    if hint is Settings:
        text = "Model from `plainvit models`, such as ViT-S/16, in place of the recipe's"
        yield Flag(name="model", kind=str, help=text, is_setting=True)
        yield from _list_fields(Config, config, is_setting=True)
    elif is_dataclass(hint):
        yield from _list_fields(hint, hint)
    else:
        options = _read_type(hint)
        is_word = parameter.kind is parameter.POSITIONAL_ONLY
        if is_word and options["nargs"]:
            options["nargs"] = "+" if required else "*"
        elif is_word and not required:
            options["nargs"] = "?"
        default = None if required else parameter.default
        text = _read_argument_help(call).get(name) or _read_annotation(hint)
        yield Flag(name=name, required=required, is_word=is_word, default=default, help=text, **options)


def _list_fields(kind: Any, values: Any, group: str = "", *, is_setting: bool = False) -> Iterator[Flag]:
    """The fields of a dataclass, and those of the dataclasses in it as GROUP.NAME."""
    for field, text in read_field_help(kind).items():
        default = getattr(values, field.name, None)
        nested = [part for part in _list_alternatives(field.type) if is_dataclass(part)]
        if not nested:
            options = _read_type(field.type)
            if group == "model." and field.name in ("image_size", "patch"):
                options["nargs"] = "+"  # one value is a square
            yield Flag(name=group + field.name, default=default, help=text, is_setting=is_setting, **options)
        elif not group:  # the stem of a hybrid has no flags
            for part in nested:
                yield from _list_fields(part, default, f"{field.name}.", is_setting=is_setting)


def _list_alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of X | Y | None, without None."""
    if get_origin(hint) not in (Union, UnionType):
        return (hint,)
    return tuple(part for part in get_args(hint) if part is not type(None))


def _read_type(hint: Any) -> dict[str, Any]:
    """The `kind`, `nargs` and `choices` of a type: str, int, float, bool, Path, Literal, tuples of them, or None."""
    (hint,) = _list_alternatives(get_args(hint)[0] if get_origin(hint) is Annotated else hint)
    nargs: int | str | None = None
    if get_origin(hint) is tuple:
        items = get_args(hint)
        hint, nargs = items[0], "*" if items[-1] is Ellipsis else len(items)
    choices = get_args(hint) if get_origin(hint) is Literal else None
    return {"kind": type(choices[0]) if choices else hint, "nargs": nargs, "choices": choices}


def _read_annotation(hint: Any) -> str:
    """The text of an `Annotated` type."""
    return "".join(getattr(hint, "__metadata__", ()))


def _read_argument_help(call: Callable[..., Any]) -> dict[str, str]:
    """The `Args` of a docstring, a line each."""
    lines = inspect.cleandoc(call.__doc__ or "").partition("\nArgs:\n")[2].splitlines()
    return {name.strip(): text for name, _, text in (line.partition(": ") for line in lines)}


def read_field_help(kind: Any) -> dict[dataclasses.Field[Any], str]:
    """Each field of a dataclass with its comment, or the text of its type."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        texts |= _read_comments(cls.__module__).get(cls.__name__, {})
    return {field: texts.get(field.name) or _read_annotation(field.type) for field in dataclasses.fields(kind)}


@functools.cache
def _read_comments(module: str) -> dict[str, dict[str, str]]:
    """The comments of the fields of a module's classes: at the end of the line, or above it after `#:`."""
    source = Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8")
    lines = source.splitlines()
    comments: dict[str, dict[str, str]] = {}
    for cls in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above = lines[node.lineno - 2].strip()
                after = lines[(node.end_lineno or 0) - 1].partition("  # ")[2]
                text = above.removeprefix("#: ") if above.startswith("#: ") else after
                comments.setdefault(cls.name, {})[node.target.id] = text
    return comments


# Parsing --------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        exit_with_error(message, 2)


def parse(call: Callable[..., Any], command: str, arguments: list[str]) -> functools.partial[Any]:
    """The call of the command's function with these arguments. An error exits with code 2."""
    flags, parser = list_flags(call), _Parser(add_help=False, allow_abbrev=False)
    for flag in flags:
        flag.add_to(parser)
    known, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        _reject(unknown[0], command, flags, parser)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(known).items()}
    words = []
    for flag in (flag for flag in flags if flag.is_word):
        is_given = given.get(flag.name) not in (None, ())
        words.append(given[flag.name] if is_given else flag.default)
    named: dict[str, Any] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.annotation is Settings:
            named[name] = Settings(
                {flag.name: given[flag.name] for flag in flags if flag.is_setting and flag.name in given}
            )
        elif is_dataclass(parameter.annotation):
            fields = {field.name for field in dataclasses.fields(parameter.annotation)}
            values = {key: given[key] for key in fields & given.keys()}
            named[name] = parameter.annotation(**values)  # pyright: ignore[reportCallIssue]
        elif parameter.kind is parameter.KEYWORD_ONLY and name in given:
            named[name] = given[name]
    return functools.partial(call, *words, **named)


def _reject(word: str, command: str, flags: list[Flag], parser: argparse.ArgumentParser) -> NoReturn:
    """Exit with an error about an unknown argument that names the closest known ones."""
    if not word.startswith("-"):
        taken = " ".join(str(flag.metavar) for flag in flags if flag.is_word) or "only flags"
        exit_with_error(f"unexpected argument {word!r}: {command} takes {taken}; switches take no value", 2)
    name, known = word.partition("=")[0], list(parser._option_string_actions)
    same = [option for option in known if option.rpartition(".")[2] == name.lstrip("-")]
    if same:
        exit_with_error(f"unknown flag {name!r}; did you mean {' or '.join(same)}?", 2)
    near = [option for option in known if option.startswith(f"{name}.")][:3]
    near = near or difflib.get_close_matches(name, known, 3, 0.5)
    hint = f"nearest: {', '.join(near)}" if near else f"`plainvit {command} --help` lists them"
    exit_with_error(f"unknown flag {name!r}; {hint}", 2)


# Help -----------------------------------------------------------------------------------------------------------------


def format_help(
    call: Callable[..., Any], command: str, *, common: Sequence[str] = (), config: Config | None = None
) -> str:
    """The help of a command: all flags, or the common ones and how to list all."""
    flags = list_flags(call, config)
    if common:
        by_name = {flag.name: flag for flag in flags}
        flags = [by_name[name] for name in common]
    words = [str(flag.metavar) for flag in flags if flag.is_word]
    width = min(shutil.get_terminal_size().columns, 120)
    paragraphs = inspect.cleandoc(call.__doc__ or "").partition("\nArgs:\n")[0].strip().split("\n\n")
    parser = _Parser(
        prog=f"plainvit {command}",
        usage=" ".join(["plainvit", command, *words, "[FLAGS]"]),
        description="\n\n".join(textwrap.fill(" ".join(text.split()), width) for text in paragraphs),
        epilog=f"Every setting is a flag: `plainvit {command} [RECIPE] {HELP_ALL}` lists all." if common else None,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=width),
        add_help=False,
    )
    parser._positionals.title = "arguments"
    groups = {"": parser.add_argument_group("flags")}
    for flag in flags:
        title = "" if common else flag.name.rpartition(".")[0]
        if flag.name in PixelFlags.__dataclass_fields__:
            title = "preprocessing, in place of what the weights say"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flag.add_to(parser if flag.is_word else groups[title])
    return parser.format_help()
