"""Define the configuration of a rank and the report of a started rank as MessagePack messages."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from negamax.config.kv_cache import KvCacheSpecs, set_index_dtype, split_over_holders
from negamax.config.model_spec import ModelSpec
from negamax.models.drafts import DraftModel
from negamax.models.registry import find_family
from negamax.options.eplb import FIXED
from negamax.options.speculation import SpeculationConfig
from negamax.parallel.layout import ParallelLayout
from negamax.worker.node_sockets import tcp_endpoint


@dataclass(frozen=True)
class RankAddresses:
    """Addresses by which the rank processes and the executor, possibly on other machines, reach
    each other. Sockets are ZeroMQ endpoints. TCP sockets require a key (`worker.node_sockets`).
    """

    plans: tuple[str, ...]  # one endpoint per rank, for all messages from the executor
    results: tuple[str, ...]  # one endpoint per data-parallel rank, for the results of its plans
    rendezvous: str  # file or TCP address of PyTorch's store, through which all ranks connect
    beats: str  # file to which the ranks of one machine write heartbeats
    interface: str | None = None  # network interface to the other machines; None: one machine

    @staticmethod
    def local(folder: str, layout: ParallelLayout) -> "RankAddresses":
        """Return paths of sockets and files. The store is a file, as a TCP store has no key."""
        return RankAddresses(
            plans=tuple(f"ipc://{folder}/rank{rank}" for rank in range(layout.world_size)),
            results=tuple(f"ipc://{folder}/results{rank}" for rank in range(layout.dp)),
            rendezvous=f"{folder}/rendezvous",
            beats=f"{folder}/beats",
        )


@dataclass(frozen=True)
class LaneOptions:
    """Options of a lane, which exchanges KV blocks in host memory with ranks of other engines."""

    kind: str  # how ranks read blocks of other engines: "nixl" or "tcp"
    folder: str  # folder for the Unix sockets of this engine's ranks
    host: str | None  # this machine's IP address; None: only engines on this machine connect

    def reads_endpoint(self, rank: int) -> str:
        """Return the endpoint for other engines' reads. On a network, the system picks the port."""
        local = f"ipc://{self.folder}/lane-{rank}"
        return local if self.host is None else tcp_endpoint(self.host, "*")

    def imports_endpoint(self, rank: int) -> str:
        """Return the endpoint at which `rank` receives messages from its own engine."""
        return f"ipc://{self.folder}/imports-{rank}"


@dataclass(frozen=True)
class MachineShare:
    """Settings of one machine: folders, network interface, and CPU threads of each rank."""

    folder: str | None
    draft_folder: str | None
    weight_cache: str | None
    crash_dump_dir: str | None
    kv_offloading_path: str | None
    num_threads: int
    beats: str  # heartbeat file, see `RankAddresses.beats`
    interface: str | None  # network interface, see `RankAddresses.interface`


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of one rank. If `folder` is None, the rank uses synthetic weights."""

    spec: ModelSpec
    eos_token_ids: tuple[int, ...]  # end tokens of the checkpoint's generation defaults
    folder: str | None
    layout: ParallelLayout
    device: str  # "cpu" or "cuda"; rank r of a machine takes the r-th GPU
    dtype: str  # compute dtype: "auto", "bfloat16", "float16", "float32"
    kv_cache_dtype: str  # "auto", "bfloat16", "float16", "fp8", "fp8_e4m3"
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory: int | None  # bytes of the KV cache of one rank; None: chosen at start
    gpu_memory_utilization: float
    cudagraph_size: int  # maximum sequences of a captured step; 0 disables CUDA graphs
    num_threads: int
    seed: int
    show_progress: bool
    addresses: RankAddresses | None  # None if the rank runs alone in the executor's process
    index_cache_dtype: str = "auto"  # allowed: the values of kv_cache_dtype
    all2all_backend: str = "allgather_reducescatter"  # between data-parallel ranks
    crash_dump_dir: str | None = None
    weight_cache: str | None = None  # folder of the weight cache
    num_replicas: int = 1  # number of engines with these options on the machine
    experts: str = FIXED  # FIXED, COUNTED (selections are counted) or MOVED (experts move)
    draft: DraftModel | None = None
    speculation: SpeculationConfig | None = None  # `model` is a folder, a bundled name or None
    max_logprobs: int = 20  # maximum log-probabilities per token that a request may ask for
    encoder_tokens: int = 0  # size of the encoder cache, in image tokens; 0: images are refused
    kv_offloading_size: float | None = None  # host memory for KV blocks of all ranks, in GiB
    kv_offloading_ratio: float | None = None  # host blocks per KV block of the device
    kv_offloading_path: str | None = None  # folder for files of KV blocks; None: no files
    kv_offloading_path_size: float = 0.0  # maximum size of the files of KV blocks, in GiB
    kernels: tuple[str, ...] = ()  # OP=PROVIDER choices for `KernelTable.select`
    self_check: bool = False
    lane: LaneOptions | None = None  # None if host blocks are not exchanged with other engines

    def on_machine(self, share: MachineShare, addresses: RankAddresses) -> "WorkerConfig":
        """Return the configuration for the ranks of one machine, which has its own folders."""
        draft = self.draft and replace(self.draft, folder=share.draft_folder)
        addresses = replace(addresses, beats=share.beats, interface=share.interface)
        names = "folder", "weight_cache", "crash_dump_dir", "kv_offloading_path", "num_threads"
        own = {name: getattr(share, name) for name in names}
        return replace(self, draft=draft, addresses=addresses, **own)

    @property
    def num_cpu_ranks(self) -> int:
        """Number of CPU ranks that share the machine's memory."""
        return self.layout.world_size * self.num_replicas

    @property
    def has_host_blocks(self) -> bool:
        return self.kv_offloading_size is not None or self.kv_offloading_ratio is not None

    @property
    def own_draft(self) -> DraftModel | None:
        """The draft model if this rank is in the last pipeline stage, else None."""
        return self.draft if self.layout.is_last_stage else None

    @property
    def num_captured_before(self) -> int:
        """Number of layers, in earlier pipeline stages, whose outputs the draft model reads."""
        first = self.layout.layers(self.spec.num_layers).start
        return sum(layer < first for layer in self.draft.spec.aux_layers) if self.draft else 0

    @property
    def kv_caches(self) -> KvCacheSpecs:
        """The cache specs of this rank's pipeline stage, then the specs of the draft model."""
        own = self.layout.layers(self.spec.num_layers)
        caches, of_index = self.spec.kv_caches()[own.start : own.stop], self.index_cache_dtype
        caches = split_over_holders(caches, self.layout.dcp)
        caches = [*caches, *(self.own_draft.spec.kv_caches() if self.own_draft else ())]
        return caches if of_index == "auto" else set_index_dtype(caches, of_index)


def decode_config(frame: bytes) -> WorkerConfig:
    """Decode the configuration from MessagePack, with the spec types of its model families."""
    config = msgspec.msgpack.decode(frame, type=WorkerConfig)
    fields = msgspec.msgpack.decode(frame)

    def convert(spec: ModelSpec, given: Any) -> Any:
        return msgspec.convert(given, type=find_family(spec.architecture).spec)

    draft = config.draft
    if draft is not None:
        draft = replace(draft, spec=convert(draft.spec, fields["draft"]["spec"]))
    return replace(config, spec=convert(config.spec, fields["spec"]), draft=draft)


@dataclass(frozen=True)
class WorkerReady:
    """The report of a started rank."""

    num_kv_blocks: int
    dtype: str
    device: str  # PyTorch's name of the device, such as "cpu" or "cuda:0"
    kernels: str  # the kernel table, one line per op
    load_summary: str
    paths: str = ""  # log text about the kernels of the QK norm and the all-reduce
    memory_summary: str = ""  # log text about the GPU memory of weights, cache and graphs
    num_draft_tokens: int = 0  # maximum draft tokens per row and step
    step_seconds: tuple[tuple[int, int, float], ...] = ()  # (rows, drafts, seconds) of timed steps
    num_host_blocks: int = 0  # number of KV blocks in host memory
    host_block_bytes: int = 0  # bytes of one host block on this rank
    num_file_blocks: int = 0  # maximum number of KV blocks in files of this rank
    file_hashes: bytes = b""  # hashes of the blocks in files at start, least recently used first.
    # `lanes`: endpoints at which other engines read host blocks. A rank reports its own endpoint.
    # Merged reports contain the endpoints of all ranks.
    lanes: tuple[str, ...] = ()
    shape: dict[str, Any] = field(default_factory=dict)  # serving shape (`worker.shape`)


# argument 1: run steps without graphs and record expert ids; argument 0: use graphs again
OBSERVE_ROUTING = "observe_routing"
# argument: number of first rows to read in each step; result: ids of the experts that these rows
# selected since the last DISTINCT_EXPERTS
DISTINCT_EXPERTS = "distinct_experts"
# result: [layers, experts] int64, selections of each expert by tokens of all ranks
EXPERT_COUNTS = "expert_counts"
# argument: number of rows; result: mean device time of captured steps launched back to back
DECODE_SECONDS = "decode_seconds"
# result of STOP_PROFILE: calls and time of each kernel that ran since START_PROFILE, or a trace
START_PROFILE, STOP_PROFILE = "start_profile", "stop_profile"


class DebugCommand(msgspec.Struct, frozen=True):
    """A command of a benchmark, such as EXPERT_COUNTS. The worker runs commands between steps."""

    name: str
    argument: int = 0
    path: str = ""  # START_PROFILE: path of the trace, without rank and suffix; empty: no trace


class KernelTime(msgspec.Struct, frozen=True):
    """One kernel in a profile."""

    name: str
    calls: int
    microseconds: float  # GPU time, summed over all calls of the kernel


class DebugResult(msgspec.Struct, frozen=True):
    """The answer to a command. Only the field with the answer is set, if there is an answer."""

    number: float | None = None
    kernels: list[KernelTime] | None = None
    counts: bytes | None = None
    experts: list[list[int]] | None = None  # ids of selected experts in each MoE layer of the rank
