"""A rank that records its proposed draft tokens: ENDPOINT RANK FOLDER, one file per rank."""

import json
import sys
from pathlib import Path

from negamax.worker import rank_process
from tests import tiny_draft

if __name__ == "__main__":
    endpoint, rank, folder = sys.argv[1:]
    seen = tiny_draft.watch(setattr)
    code = rank_process.main(endpoint, int(rank))
    Path(folder, f"rank{rank}").write_text(json.dumps(seen))
    sys.exit(code)
