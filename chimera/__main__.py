"""``python -m chimera`` is the ``chimera`` command."""

import sys

from chimera.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
