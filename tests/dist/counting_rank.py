"""A rank that writes the number of tokens of each step into the folder COUNTED_TOKENS."""

import os
import sys
from pathlib import Path
from typing import Any

from negamax.models.decoder import Decoder
from negamax.worker import rank_process

if __name__ == "__main__":
    endpoint, rank = sys.argv[1:]
    forward, counts = Decoder.forward, list[int]()

    def counted(self: Decoder, token_ids: Any, *args: Any, **options: Any) -> Any:
        counts.append(len(token_ids))
        return forward(self, token_ids, *args, **options)

    Decoder.forward = counted  # type: ignore[method-assign]
    code = rank_process.main(endpoint, int(rank))
    Path(os.environ["COUNTED_TOKENS"], rank).write_text(" ".join(map(str, counts)))
    sys.exit(code)
