"""Settings of an engine whose ranks run on several machines."""

from dataclasses import dataclass

from negamax.base.errors import ConfigError
from negamax.options.parallel import ParallelOptions

MASTER_PORT = 29501  # vLLM's default
MOST_NODES = 64
KEY_VARIABLE = "NEGAMAX_NODE_KEY"  # environment variable of the secret that all nodes share
MP, RAY = "mp", "ray"
LAUNCHERS = (MP, RAY)  # the user (MP) or Ray (RAY) starts the agents of other nodes


@dataclass(frozen=True)
class NodeOptions:
    """Settings for machines with equal numbers of ranks. Node 0 runs the server."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None  # An address of node 0 that all nodes can reach.
    master_port: int = MASTER_PORT  # First of the consecutive ports that node 0 uses.
    interface: str | None = None  # None: the interface that reaches master_addr.
    allow_cross_node_tp: bool = False
    launcher: str = MP  # with RAY, Ray chooses the machine of each node's agent

    def __post_init__(self) -> None:
        if not 1 <= self.nnodes <= MOST_NODES:
            raise ConfigError(f"--nnodes is {self.nnodes}; allowed: 1 to {MOST_NODES}")
        if not 0 <= self.node_rank < self.nnodes:
            refusal = f"--node-rank is {self.node_rank}; allowed: 0 to {self.nnodes - 1}"
            raise ConfigError(refusal, hint="set the number of machines with --nnodes")
        if not 1 <= self.master_port <= 65535:
            raise ConfigError(f"--master-port is {self.master_port}; allowed: 1 to 65535")
        if self.launcher == RAY and self.node_rank:
            raise ConfigError(
                f"--node-rank is {self.node_rank}, and --distributed-executor-backend is ray, "
                f"which starts the other nodes itself",
                hint="leave --node-rank out, and serve on one machine of the cluster",
            )
        if self.nnodes > 1 and not self.master_addr and self.launcher == MP:
            refusal = "--master-addr is missing; all nodes connect to this address of node 0"
            raise ConfigError(refusal, hint="set the same --master-addr on all nodes")

    def check(self, parallel: ParallelOptions) -> None:
        """Raise `ConfigError` if the ranks cannot be spread over the `nnodes` machines."""
        nodes, ranks, tensor = self.nnodes, parallel.num_ranks, parallel.tensor_parallel_size
        if nodes == 1:
            return
        if ranks % nodes:
            raise ConfigError(
                f"{ranks} ranks cannot be divided equally over --nnodes {nodes}",
                hint=f"use --pipeline-parallel-size {nodes} or --data-parallel-size {nodes}, with "
                f"--tensor-parallel-size for the GPUs of a node",
            )
        share = ranks // nodes
        if share % tensor and not self.allow_cross_node_tp:
            within = max(size for size in range(1, share + 1) if share % size == 0)
            raise ConfigError(
                f"--tensor-parallel-size is {tensor}, but a node has {share} ranks; most networks "
                f"are too slow for tensor parallelism, which exchanges data in every layer",
                hint=f"use --tensor-parallel-size {within} with --pipeline-parallel-size {nodes} "
                f"or --data-parallel-size {nodes}, or add --allow-cross-node-tp",
            )
