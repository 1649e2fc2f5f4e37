"""A rank with a proposer of `tests.drafts`: ENDPOINT RANK FILE, where FILE holds the texts."""

import json
import sys
from pathlib import Path

from negamax.worker import rank_process
from tests import drafts

if __name__ == "__main__":
    endpoint, rank, file = sys.argv[1:]
    known = json.loads(Path(file).read_text())
    outputs = {(seed, tuple(prompt)): tokens for seed, prompt, tokens in known}
    drafts.install(setattr, drafts.KnowingProposer(drafts.RANDOM, outputs))
    sys.exit(rank_process.main(endpoint, int(rank)))
