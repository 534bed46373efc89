import sys

from lightning_lowbit.cli import main

sys.exit(main())
