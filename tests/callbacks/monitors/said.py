"""What monitors warn of."""

import warnings
from contextlib import contextmanager


@contextmanager
def alerts_said():
    """The alerts that are warned of within this context, without the names of monitors; other warnings go on."""
    texts = []
    with warnings.catch_warnings(record=True, action="always") as said:
        yield texts
    for one in said:
        _, is_alert, text = str(one.message).partition("Monitor: ")
        if is_alert:
            texts.append(text)
        else:
            warnings.warn(one.message, stacklevel=1)
