"""The machines that an engine's ranks are spread over, and their meeting point."""

from dataclasses import dataclass

from negamax.base.errors import ConfigError
from negamax.options.parallel import ParallelOptions

MASTER_PORT = 29501  # as in vLLM
MOST_NODES = 64
KEY_VARIABLE = "NEGAMAX_NODE_KEY"  # a secret that all nodes share
MP, RAY = "mp", "ray"
LAUNCHERS = (MP, RAY)  # that start the other nodes' agents: the command there, or Ray


@dataclass(frozen=True)
class NodeOptions:
    """Machines with equally many ranks; node 0 has server and scheduler. Errors: `ConfigError`."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None  # an address of node 0 that all nodes reach
    master_port: int = MASTER_PORT  # the first of several on node 0
    interface: str | None = None  # of the network; None: the one towards master_addr
    allow_cross_node_tp: bool = False
    launcher: str = MP  # RAY: Ray chooses the machines

    def __post_init__(self) -> None:
        if not 1 <= self.nnodes <= MOST_NODES:
            raise ConfigError(f"--nnodes is {self.nnodes}; allowed: 1 to {MOST_NODES}")
        if not 0 <= self.node_rank < self.nnodes:
            several, missing = (
                f"with --nnodes {self.nnodes}",
                "say with --nnodes how many there are",
            )
            refusal = f"--node-rank is {self.node_rank}; allowed: 0 to {self.nnodes - 1}"
            raise ConfigError(refusal, hint=several if self.nnodes > 1 else missing)
        if not 1 <= self.master_port <= 65535:
            raise ConfigError(f"--master-port is {self.master_port}; allowed: 1 to 65535")
        if self.launcher == RAY and self.node_rank:
            raise ConfigError(
                f"--node-rank is {self.node_rank}, and --distributed-executor-backend is ray: it "
                f"starts the other nodes itself",
                hint="leave it out, and serve on one machine of the cluster",
            )
        if self.nnodes > 1 and not self.master_addr and self.launcher == MP:
            refusal = "--master-addr is missing; the nodes meet at an address of node 0"
            raise ConfigError(refusal, hint="give the same one on all nodes")

    def check(self, parallel: ParallelOptions) -> None:
        """Refuse ranks that cannot be spread over these nodes. Errors: `ConfigError`."""
        nodes, ranks, tensor = self.nnodes, parallel.num_ranks, parallel.tensor_parallel_size
        if nodes == 1:
            return
        if ranks % nodes:
            raise ConfigError(
                f"--nnodes is {nodes} and there are {ranks} ranks; each node has as many",
                hint=f"use --pipeline-parallel-size {nodes} or --data-parallel-size {nodes}, with "
                f"--tensor-parallel-size for the GPUs of a node",
            )
        share = ranks // nodes
        if share % tensor and not self.allow_cross_node_tp:
            within = max(size for size in range(1, share + 1) if share % size == 0)
            raise ConfigError(
                f"--tensor-parallel-size is {tensor} and a node has {share} of the ranks; these "
                f"exchange data several times in every layer, which networks are too slow for",
                hint=f"use --tensor-parallel-size {within} with --pipeline-parallel-size {nodes} "
                f"or --data-parallel-size {nodes}; --allow-cross-node-tp insists",
            )
