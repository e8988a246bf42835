"""`python -m noisecast`: the command line, also where the folder of scripts is not on the path."""

import sys

from noisecast.cli import main

if __name__ == "__main__":
    sys.exit(main())
