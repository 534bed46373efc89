"""The parser of the commands that are not Lightning's: a mistake is one line, with a command that works."""

import argparse
import re
from typing import Any, NoReturn

from lightning_lowbit.checks import nearest

_TYPES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Parses the options of a command, ``prog``, which works with the arguments of the ``example``; a mistake is a
    ``ValueError``. Options are not abbreviated."""

    def __init__(self, prog: str, example: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)
        self._example = f"{prog} {example}".strip()
        self._unknown: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = (argument.partition("=")[0] for argument in args or ())
        known = self._option_string_actions
        self._unknown = [option for option in options if option.startswith("--") and option not in known]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self._explain(message)} For example: {self._example}. `{self.prog} --help` tells more.")

    def _explain(self, message: str) -> str:
        """Says what is missing or wrong, from a message of argparse."""
        if self._unknown and message.startswith(("unrecognized arguments: -", "the following arguments are required")):
            option = self._unknown[0]
            return f"There is no option {option}.{nearest(option, sorted(self._option_string_actions))}"
        if missing := re.fullmatch("the following arguments are required: (.*)", message):
            return f"{self.prog} needs {' and '.join(map(self._described, missing[1].split(', ')))}."
        if unknown := re.fullmatch("unrecognized arguments: (.*)", message):
            return f"{self.prog} takes no further argument; got {unknown[1]!r}."
        if not (argument := re.fullmatch(r"argument ([^ :]+): (.*)", message, re.DOTALL)):
            return f"{message.rstrip('.').capitalize()}."
        option, problem = argument[1].rpartition("/")[2], argument[2]
        if problem == "expected one argument":
            return f"{option} takes a value, and none follows it."
        if choice := re.match("invalid choice: '(.*?)' ", problem):
            choices = [*(self._option_string_actions[option].choices or ())]
            return f"{option} has no {choice[1]!r}.{nearest(choice[1], choices)} Choose one of: {', '.join(choices)}."
        if value := re.fullmatch("invalid (.*) value: (.*)", problem):
            return f"{option} takes {_TYPES.get(value[1], 'other values')}; got {value[2]}."
        return f"{option} {problem.rstrip('.')}."  # of a type of ours

    def _described(self, name: str) -> str:
        """Names a missing argument with the words of its help."""
        actions = (action for action in self._actions if name in (action.dest, action.metavar, *action.option_strings))
        action = next(actions, None)
        about = re.split("[;,(]", str(action.help))[0].strip() if action is not None and action.help else ""
        name = name if name.startswith("-") else name.upper()
        return f"{name} ({about})" if about else name
