"""`python -m vitral` is `vitral`."""

import sys

from vitral.cli.main import main

sys.exit(main())
