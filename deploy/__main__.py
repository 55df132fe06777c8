"""`python -m espalier.deploy` is `espalier`."""

import sys

from espalier.deploy.cli import main

sys.exit(main())
