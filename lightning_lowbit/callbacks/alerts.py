"""What callbacks warn of: each thing once in a run, and again on the page of the run."""

from collections.abc import Mapping

from lightning_lowbit._lightning import rank_zero_warn


class Alerts:
    """Warnings by subject and kind.

    Args:
        owner: what warns, which a warning begins with.

    Attributes:
        said: the warnings, by subject and kind; what a checkpoint keeps.
    """

    def __init__(self, owner: object) -> None:
        self._owner = type(owner).__name__
        self.said: dict[str, dict[str, str]] = {}

    def say(self, subject: str, kind: str, step: int, message: str) -> None:
        """Warns, unless that was said before.

        Args:
            subject: what something is wrong with, such as a layer's name.
            kind: what is wrong with it.
            step: the optimizer step that showed it.
            message: the same in words, and what to do.
        """
        of_subject = self.said.setdefault(subject, {})
        if kind not in of_subject:
            of_subject[kind] = f"{subject}, step {step}: {message}"
            rank_zero_warn(f"{self._owner}: {of_subject[kind]}")

    def kinds(self, subject: str) -> list[str]:
        """What was said of a subject."""
        return list(self.said.get(subject, {}))

    def texts(self) -> list[str]:
        """All that was said."""
        return [text for of_subject in self.said.values() for text in of_subject.values()]

    def state_dict(self) -> dict[str, dict[str, str]]:
        """A copy of what was said."""
        return {subject: dict(texts) for subject, texts in self.said.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, str]]) -> None:
        """Takes what :meth:`state_dict` gave."""
        self.said = {subject: dict(texts) for subject, texts in state.items()}
