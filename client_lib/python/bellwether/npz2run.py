"""python -m bellwether.npz2run IN.npz OUT.bwrun: a recorded trace as a recorded run."""

import sys

from .tools.npz2run import main

if __name__ == "__main__":
    sys.exit(main())
