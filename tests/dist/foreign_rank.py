"""A rank that registers the family of `tests/cpu/foreign_family`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from foreign_family.config import FAMILY

from negamax.models.registry import FAMILIES
from negamax.worker import rank_process

if __name__ == "__main__":
    FAMILIES[FAMILY.architecture] = FAMILY
    sys.exit(rank_process.main(sys.argv[1], int(sys.argv[2])))
