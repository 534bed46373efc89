"""``python -m tests.strangers [NAME ...]`` prints how much of each model NVFP4 covers, and the rest."""

import logging
import sys
import warnings
from functools import partial

from tests.strangers.architectures import ARCHITECTURES
from tests.strangers.packages import STRANGERS, Stranger
from tests.strangers.training import train


def main(names):
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "transformers"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    for name in names or [*ARCHITECTURES, *STRANGERS]:
        row = ARCHITECTURES.get(name) or STRANGERS[name]
        if isinstance(row, Stranger) and not row.is_installed:
            print(f"{name:32} {row.package} is not installed")
            continue
        coverage, uncovered = train(partial(row.build, name) if name in ARCHITECTURES else row.build, row.batch())
        rest = "; ".join(f"{share:.1%} {where} ({why})" for where, share, why in uncovered[:2])
        print(f"{name:32}{coverage:8.1%}   {rest}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
