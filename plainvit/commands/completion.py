"""The commands and their flags -> a completion script for a shell: `plainvit completion bash`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from plainvit.commands.flags import list_flags

Commands = Mapping[str, Callable[..., Any]]

BASH = """# bash completion for plainvit
_plainvit() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [[ $COMP_CWORD -gt 1 && $current != -* ]]; then COMPREPLY+=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _plainvit plainvit
"""
ZSH = """#compdef plainvit
_plainvit() {{
  local words_given="${{words[2,CURRENT-1]}}" words
  case "$words_given " in
{cases}
  esac
  compadd -- ${{=words}}
  if (( CURRENT > 2 )) && [[ $PREFIX != -* ]]; then _files; fi
}}
if [[ $funcstack[1] == _plainvit ]]; then _plainvit; else compdef _plainvit plainvit; fi
"""


def format_completion(shell: str, commands: Commands) -> str:
    """The script of bash, zsh or fish."""
    if shell == "fish":
        return "\n".join(["# fish completion for plainvit", *_list_fish_lines(commands)]) + "\n"
    choices = {name: _list_next_words(name, commands) for name in {*commands, *(name.split()[0] for name in commands)}}
    longest_first = sorted(choices, key=lambda name: (-len(name.split()), name))
    cases = [f'    "{name} "*) words="{" ".join(choices[name])}" ;;' for name in longest_first]
    first = dict.fromkeys(name.split()[0] for name in commands)
    cases.append(f'    *) words="{" ".join([*first, "--help", "--version"])}" ;;')
    return (BASH if shell == "bash" else ZSH).format(cases="\n".join(cases))


def _list_next_words(name: str, commands: Commands) -> list[str]:
    """What may follow a command: the second words of its family, and its flags."""
    family = [other.split()[1] for other in commands if other.startswith(f"{name} ")]
    flags = [flag.option for flag in list_flags(commands[name]) if not flag.is_word] if name in commands else []
    return [*family, *flags, "--help"]


def _list_fish_lines(commands: Commands) -> list[str]:
    lines = []
    for name, call in commands.items():
        first, _, second = name.partition(" ")
        about = _quote((inspect.getdoc(call) or "").splitlines()[0])
        seen = f"__fish_seen_subcommand_from {first}"
        if second:
            lines.append(f"complete -c plainvit -n '{seen}' -a {second} -d {about}")
            seen += f"; and __fish_seen_subcommand_from {second}"
        lines.append(f"complete -c plainvit -n __fish_use_subcommand -a {first} -d {about}")
        flags = [flag for flag in list_flags(call) if not flag.is_word]
        lines += [f"complete -c plainvit -n '{seen}' -l {flag.option[2:]} -d {_quote(flag.help)}" for flag in flags]
    return lines


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
