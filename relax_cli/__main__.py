"""`python -m relax_cli` is `relax`."""

import sys

from relax_cli.cli.app import main

sys.exit(main())
