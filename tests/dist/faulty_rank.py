import sys

from negamax.worker import rank_process
from tests import row_faults

if __name__ == "__main__":
    endpoint, rank = sys.argv[1], int(sys.argv[2])
    row_faults.install(rank, setattr)
    sys.exit(rank_process.main(endpoint, rank))
