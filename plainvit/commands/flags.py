"""Command-line arguments -> a call of a Python function.

The parameters of a command's function are its arguments: positional-only ones are words, keyword-only ones are flags,
and the fields of a dataclass are flags too. A parameter of type `Settings` stands for every field of a run's `Config`.
Help texts are the `Args` of the docstring and the comments of the fields. Errors are one line.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from plainvit.commands.parsing import exit_with_error
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
    group: str = ""
    help: str = ""

    @property
    def option(self) -> str:
        """--image-size for image_size; --for for a parameter for_, as `for` is a word of Python."""
        return f"--{self.name.rstrip('_').replace('_', '-')}"

    @property
    def metavar(self) -> str | None:
        """MODEL, [PATTERN], CARD ... for words; the type of a flag's value."""
        if self.is_word:
            name = self.name.upper() if self.nargs in (None, "?") else f"{self.name.upper().removesuffix('S')} ..."
            return name if self.required else f"[{name}]"
        if self.name == "model":
            return "NAME"
        return f"{{{','.join(map(str, self.choices))}}}" if self.choices else self.kind.__name__.upper()

    def add_to(self, parser: "argparse._ActionsContainer") -> None:
        """Add it to a parser; a flag that is not given leaves no value."""
        text = self._describe().replace("%", "%%")
        if self.is_word:
            parser.add_argument(self.name, metavar=self.metavar, nargs=self.nargs, type=self.kind, help=text)
        elif self.kind is bool:
            self._add_switch(parser, text)
        else:
            options = {"choices": self.choices, "required": self.required, "default": argparse.SUPPRESS, "help": text}
            options |= {"metavar": self.metavar, "nargs": self.nargs, "type": self.kind}
            parser.add_argument(self.option, dest=self.name, **options)

    def _add_switch(self, parser: "argparse._ActionsContainer", text: str) -> None:
        """--model.class-token, and for settings --model.no-class-token; help shows the one that changes the default."""
        group, dot, name = self.option[2:].rpartition(".")
        options = {self.option: True} | ({f"--{group}{dot}no-{name}": False} if self.is_setting else {})
        for option, value in options.items():
            shown = argparse.SUPPRESS if value == (self.default is True) else text
            settings = {"action": "store_const", "const": value, "default": argparse.SUPPRESS, "help": shown}
            parser.add_argument(option, dest=self.name, **settings)

    def _describe(self) -> str:
        if self.default in (None, "", (), False) or self.is_word:
            return self.help + (" (required)" if self.required and not self.is_word else "")
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        return f"{self.help} (default: {shown})"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        exit_with_error(message, 2)


# Flags ----------------------------------------------------------------------------------------------------------------


def list_flags(call: Callable[..., Any], config: Config | None = None) -> Iterator[Flag]:
    """The arguments of a command; settings of a run have the values of `config` as defaults."""
    helps = _read_argument_help(call)
    for name, parameter in inspect.signature(call).parameters.items():
        hint, required = parameter.annotation, parameter.default is parameter.empty
        if hint is Settings:
            yield from _list_settings(config)
        elif dataclasses.is_dataclass(hint):
            for field, text in _read_field_help(hint).items():
                yield Flag(name=field.name, default=field.default, help=text, **_read_type(field.type))
        else:
            options = _read_type(hint)
            if is_word := parameter.kind is parameter.POSITIONAL_ONLY:
                repeated = "+" if required else "*"
                options["nargs"] = repeated if options["nargs"] else None if required else "?"
            default = None if required else parameter.default
            options |= {"required": required, "is_word": is_word, "default": default}
            yield Flag(name=name, help=helps.get(name, ""), **options)


def _list_settings(config: Config | None) -> Iterator[Flag]:
    """Every setting of a run; for the model, those of a ViT and of a ResNet."""
    text = "Model from `plainvit models`, such as ViT-S/16, in place of the recipe's"
    yield Flag(name="model", kind=str, help=text, is_setting=True)
    for field, text in _read_field_help(Config).items():
        nested = [kind for kind in _list_alternatives(field.type) if dataclasses.is_dataclass(kind)]
        if nested:
            yield from _list_nested(field.name, nested, getattr(config, field.name, None))
        elif field.name != "recipe":
            default = getattr(config, field.name, None)
            yield Flag(name=field.name, default=default, help=text, is_setting=True, **_read_type(field.type))


def _list_nested(group: str, kinds: list[Any], values: Any) -> Iterator[Flag]:
    """The fields of a part of the config, such as optim."""
    fields = {field.name: (field, text) for kind in reversed(kinds) for field, text in _read_field_help(kind).items()}
    for name, (field, text) in fields.items():
        if any(map(dataclasses.is_dataclass, _list_alternatives(field.type))):  # the stem of a hybrid
            continue
        options = _read_type(field.type)
        if group == "model" and name in ("image_size", "patch"):
            options["nargs"] = "+"  # one value is a square
        default = getattr(values, name, None)
        yield Flag(name=f"{group}.{name}", default=default, help=text, is_setting=True, group=group, **options)


def _list_alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of X | Y | None, without None."""
    if get_origin(hint) not in (Union, UnionType):
        return (hint,)
    return tuple(one for one in get_args(hint) if one is not type(None))


def _read_type(hint: Any) -> dict[str, Any]:
    """The `kind`, `nargs` and `choices` of a type: str, int, float, bool, Path, Literal, tuples of them, or None."""
    (hint,) = _list_alternatives(hint)
    nargs: int | str | None = None
    if get_origin(hint) is tuple:
        items = get_args(hint)
        hint, nargs = items[0], "*" if items[-1] is Ellipsis else len(items)
    choices = get_args(hint) if get_origin(hint) is Literal else None
    return {"kind": type(choices[0]) if choices else hint, "nargs": nargs, "choices": choices}


def _read_argument_help(call: Callable[..., Any]) -> dict[str, str]:
    """The `Args` of a docstring, a line each."""
    lines = inspect.cleandoc(call.__doc__ or "").partition("\nArgs:\n")[2].splitlines()
    return {name.strip(): text for name, _, text in (line.partition(": ") for line in lines)}


def _read_field_help(kind: Any) -> dict[dataclasses.Field[Any], str]:
    """Each field of a dataclass with its comment."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        texts |= _read_comments(cls.__module__).get(cls.__name__, {})
    return {field: texts.get(field.name, "") for field in dataclasses.fields(kind)}


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


def parse(call: Callable[..., Any], command: str, arguments: list[str]) -> functools.partial[Any]:
    """The call of the command's function with these arguments. An error exits with code 2."""
    flags, parser = list(list_flags(call)), _Parser(add_help=False, allow_abbrev=False)
    for flag in flags:
        flag.add_to(parser)
    known = [option for action in parser._actions for option in action.option_strings]
    found, unknown = parser.parse_known_intermixed_args([_spell(word) for word in arguments])
    if unknown:
        _reject(unknown[0], command, known, [flag.metavar for flag in flags if flag.is_word])
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()}
    words = [flag for flag in flags if flag.is_word]
    positional = [flag.default if given.get(flag.name) in (None, ()) else given[flag.name] for flag in words]
    settings = {flag.name for flag in flags if flag.is_setting}
    named: dict[str, Any] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        hint = parameter.annotation
        if hint is Settings:
            named[name] = Settings({key: value for key, value in given.items() if key in settings})
        elif dataclasses.is_dataclass(hint):
            fields = {field.name for field in dataclasses.fields(hint)}
            named[name] = hint(**{key: value for key, value in given.items() if key in fields})  # pyright: ignore
        elif parameter.kind is parameter.KEYWORD_ONLY and name in given:
            named[name] = given[name]
    return functools.partial(call, *positional, **named)


def _spell(word: str) -> str:
    """--image_size is --image-size."""
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if flag.startswith("--") else word


def _reject(word: str, command: str, known: list[str], words: list[str | None]) -> NoReturn:
    """Exit because of an argument that the command does not take, with what may have been meant."""
    if not word.startswith("-"):
        taken = " ".join(map(str, words)) or "only flags"
        exit_with_error(f"unexpected argument {word!r}: {command} takes {taken}; switches take no value", 2)
    flag = word.partition("=")[0]
    near = [one for one in known if one.startswith(f"{flag}.")][:3] or difflib.get_close_matches(flag, known, 3, 0.5)
    hint = f"nearest: {', '.join(near)}" if near else f"`plainvit {command} --help` lists them"
    exit_with_error(f"unknown flag {flag!r}; {hint}", 2)


# Help -----------------------------------------------------------------------------------------------------------------


def format_help(
    call: Callable[..., Any], command: str, *, common: Iterable[str] = (), config: Config | None = None
) -> str:
    """The help of a command: all flags, or the common ones and how to list all."""
    common = tuple(common)
    flags = list(list_flags(call, config))
    if common:
        flags = [flag for name in common for flag in flags if name == flag.name]
    words = [flag.metavar for flag in flags if flag.is_word]
    width = min(shutil.get_terminal_size().columns, 120)
    paragraphs = inspect.cleandoc(call.__doc__ or "").partition("\nArgs:\n")[0].strip().split("\n\n")
    parser = _Parser(
        prog=f"plainvit {command}",
        usage=" ".join(["plainvit", command, *map(str, words), "[FLAGS]"]),
        description="\n\n".join(textwrap.fill(" ".join(text.split()), width) for text in paragraphs),
        epilog=f"Every setting is a flag: `plainvit {command} [RECIPE] {HELP_ALL}` lists all." if common else None,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=width),
        add_help=False,
    )
    parser._positionals.title = "arguments"
    groups = {"": parser.add_argument_group("flags")}
    for flag in flags:
        if flag.is_word:
            flag.add_to(parser)
        else:
            title = "" if common else flag.group
            flag.add_to(groups.setdefault(title, groups.get(title) or parser.add_argument_group(title)))
    return parser.format_help()
