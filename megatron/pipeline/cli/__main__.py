"""``python -m megatron.pipeline.cli`` is ``mpipe``."""

import sys

from megatron.pipeline.cli import main

sys.exit(main())
