"""Options of `vllm serve` 0.33 and `sglang.launch_server` 0.5.23, and older ones, that are not
ours.

Names for the same thing stand beside our own options (`Flag.also`). This is the table of the
others: mapped to ours, ignored with a line that says why nothing is needed, or refused with the
reason and what to do instead. An option is refused where leaving it out would serve something else
than was asked for, or less securely (decision 15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from negamax.cli import foreign_rules as rules
from negamax.cli.flags import Kind
from negamax.cli.foreign_rules import EXPERTS, GRAPHS, Rule

# values that ask for nothing, in any case
_NOTHING = ("", "none", "null", "{}", "[]", "false", "disabled", "auto")


@dataclass(frozen=True)
class Foreign:
    """What one option of another server means here. `remedy` is what to do instead; without one the
    option is ignored."""

    kind: Kind
    reason: str
    remedy: str | None = None
    unless: tuple[str, ...] = _NOTHING
    rule: Rule | None = None


def _group(
    reason: str,
    *,
    remedy: str | None = None,
    unless: str = "",
    rule: Rule | None = None,
    switches: str = "",
    values: str = "",
    lists: str = "",
    json: str = "",
) -> Iterator[tuple[str, Foreign]]:
    kinds = ((Kind.SWITCH, switches), (Kind.VALUE, values), (Kind.LIST, lists), (Kind.JSON, json))
    for kind, names in kinds:
        entry = Foreign(kind, reason, remedy, (*_NOTHING, *unless.split()), rule)
        for name in names.split():
            yield (name if name.startswith("-") else f"--{name}"), entry


_IGNORED = (
    _group("no code of a checkpoint is ever run", switches="trust-remote-code"),
    _group(
        "it is so anyway",
        switches="""enable-auto-tool-choice enable-tokenizer-info-endpoint enable-chunked-prefill
        enable-prompt-tokens-details enable-cache-report enable-metrics enable-response-store
        enable-request-id-headers enable-mixed-chunk incremental-streaming-output
        use-v2-block-manager enable-reasoning disable-fastapi-docs enable-log-deltas
        enable-metrics-for-all-schedulers disable-sliding-window disable-hybrid-kv-cache-manager
        disable-hybrid-swa-memory disable-cascade-attn skip-server-warmup""",
    ),
    _group(
        "there are as many micro-batches as pipeline stages, with chunks that take equally long",
        values="pp-max-micro-batch-size pp-async-batch-depth",
    ),
    _group(
        rules.KERNELS,
        switches="""enable-lean-attention enable-nvidia-megakernel enable-amd-monokernel
        disable-flashinfer-autotune enable-flashinfer-autotune triton-attention-reduce-in-fp32
        flashinfer-mla-disable-ragged enable-fused-qk-norm-rope enable-torch-compile
        enable-torch-compile-debug-mode enable-fused-moe-sum-all-reduce enable-w4a4-mxfp4-megamoe
        monokernel disable-shared-experts-fusion enforce-shared-experts-fusion
        disable-flashinfer-cutlass-moe-fp4-allgather use-fp64-gumbel enable-two-batch-overlap
        enable-single-batch-overlap enable-dbo enable-fp32-lm-head enable-tf32-matmul
        enable-batch-sharded-sampling enable-shared-experts-attn-tp enable-dense-mlp-attn-tp
        enable-layernorm-sp enable-hc-sp enable-megamoe-for-layernorm-sp enable-dsa-fused-indexer
        enable-deepseek-v4-fp4-indexer disable-flashinfer enable-dp-lm-head
        enable-tp-lm-head-all-to-all enable-attn-tp-input-scattered
        enable-encoder-swa-bounded-replay enable-decoder-swa-bounded-replay swa-bounded-replay
        kv-sharing-fast-prefill enable-page-major-kv-layout disable-attn-tp-gather
        disable-chunked-prefix-cache""",
        values="""attention-backend decode-attention-backend prefill-attention-backend
        prefill-kv-cache-dequant-dtype moe-backend sampling-backend fp8-gemm-backend
        fp4-gemm-backend bf16-gemm-backend linear-backend moe-runner-backend ubatch-size
        triton-attention-num-kv-splits triton-attention-split-tile-size torch-compile-max-bs
        flashinfer-mxfp4-moe-precision dsa-prefill-backend dsv4-prefill-backend dsa-triton-union
        dsa-decode-backend dsv4-attn-backend dsa-topk-backend dsa-paged-mqa-logits-backend
        gdn-prefill-backend kda-prefill-backend kda-decode-backend sparse-indexer-topk-backend
        dbo-decode-token-threshold dbo-prefill-token-threshold tbo-token-distribution-threshold
        moe-dense-tp-size shared-experts-tp-size qsa-indexer-dtype
        monokernel-backend model-impl swa-full-tokens-ratio swa-prefix-tails c128-page-size
        prefix-match-unit""",
        lists="flashinfer-autotune-skip-ops kv-cache-dtype-skip-layers",
        json="kernel-config ir-op-priority additional-config engram-config",
    ),
    _group(rules.KERNELS, rule=rules.attention, json="attention-config -ac"),
    _group(
        GRAPHS,
        switches="""disable-prefill-cuda-graph disable-cuda-graph-padding
        enable-profile-cuda-graph enable-cudagraph-gc debug-cuda-graph cudagraph-metrics""",
        values="""cuda-graph-backend-prefill cuda-graph-max-bs-prefill
        cuda-graph-max-seq-len-prefill max-seq-len-to-capture cuda-graph-prefill-max-context
        context-bucket""",
        lists="cuda-graph-bs-prefill",
        json="cuda-graph-config",
    ),
    _group(GRAPHS, rule=rules.compilation, json="compilation-config -cc -O optimization-level"),
    _group(
        GRAPHS,
        rule=rules.capture_sizes,
        lists="cudagraph-capture-sizes cuda-graph-sizes cuda-graph-bs cuda-graph-bs-decode",
    ),
    _group(GRAPHS, rule=rules.graph_backend, values="cuda-graph-backend-decode"),
    _group(GRAPHS, rule=rules.no_decode_graphs, switches="disable-decode-cuda-graph"),
    _group(
        "ranks exchange data through memory they share, and NCCL where there is none",
        switches="""disable-custom-all-reduce enable-nccl-nvls enable-symm-mem enable-mscclpp
        enable-torch-symm-mem pre-warm-nccl enable-quant-communications
        enable-flashinfer-allreduce-fusion enforce-disable-flashinfer-allreduce-fusion
        enable-aiter-allreduce-fusion disable-aiter-allreduce-fusion-in-prefill
        disable-aiter-allreduce-fusion-in-decode enable-scattered-sconv enable-p2p-check
        enable-nccl-comm-suspend enable-shm-tensor-arena disable-nccl-for-dp-synchronization
        dcp-q-replicate dcp-replicate-q-proj""",
        values="""boundary-reduction flashinfer-allreduce-fusion-backend nccl-port dist-timeout
        distributed-timeout-seconds cpu-distributed-timeout-seconds dcp-comm-backend
        dp-sync-interval cp-strategy""",
    ),
    _group(
        "each machine starts its ranks itself, as processes",
        switches="""ray-workers-use-nsight numa-bind
        disable-frontend-multiprocessing sleep-on-idle""",
        values="""max-parallel-loading-workers nccl-init-addr gated-launch-port
        detokenizer-worker-num renderer-num-workers custom-sigquit-handler""",
        lists="numa-node numa-bind-nodes numa-bind-cpus gc-threshold",
    ),
    _group(
        EXPERTS,
        switches="enable-ep-weight-filter enable-elastic-ep enable-elastic-expert-backup",
        values="""moe-a2a-backend deepep-mode deepep-v2-mode fuseep-mode
        deepep-dispatcher-output-dtype flashinfer-a2a-dispatch-type deepep-config
        elastic-ep-backend mooncake-ib-device ep-join-mode elastic-ep-join-mode
        elastic-ep-scale-timeout ep-join-rank-offset elastic-ep-join-rank-offset
        elastic-ep-initial-size elastic-ep-max-dp-size max-ep-size
        expert-placement-strategy""",
        json="fault-tolerance-config",
    ),
    _group(
        "requests go to the data-parallel rank where they cost least",
        switches="enable-dp-attention-local-control-broadcast",
        values="load-balance-method",
    ),
    _group("it is so with --data-parallel-size", switches="enable-dp-attention"),
    _group(
        "a token says what copy of an expert it takes; copies move one by one",
        values="""ep-dispatch-algorithm eplb-algorithm eplb-rebalance-layers-per-chunk""",
        switches="enable-waterfill",
    ),
    _group(
        "choices of experts are counted on the device, and their balancedness is a metric",
        values="expert-distribution-recorder-buffer-size expert-balancedness-report-mode",
        switches="enable-expert-distribution-metrics",
    ),
    *(
        _group(rules.EPLB, rule=rules.eplb(key), values=names)
        for key, names in rules.EPLB_KEYS.items()
    ),
    _group(rules.EPLB, rule=rules.eplb("log_balancedness"), switches="eplb-log-balancedness"),
    _group(EXPERTS, rule=rules.expert_parallel, switches="enable-ep-moe enable-deepep-moe"),
    _group(
        "the KV cache is not split by context; the answers are the same",
        switches="""enable-kv-cache-sharding enable-cp-decode-attn-tp
        enable-dsa-cache-layer-split""",
    ),
    _group("it is so with --prefill-context-parallel-size", switches="enable-prefill-cp"),
    *(
        _group(rules.SPECULATION, rule=rules.speculation(key), values=names)
        for key, names in rules.SPECULATION_KEYS.items()
    ),
    _group(rules.SPECULATION, rule=rules.speculation("adaptive"), switches="speculative-adaptive"),
    _group(
        "drafts are chains that are sampled and compared; the answers are the same without it",
        switches="""speculative-dspark-align-verify-tokens-to-graph-tier
        speculative-use-rejection-sampling enable-multi-layer-eagle
        speculative-use-block-verification speculative-enable-w4a4-mxfp4-megamoe
        enable-draft-weights-cpu-backup""",
        values="""per-request-spec-decode-metrics speculative-draft-load-format
        speculative-eagle-topk speculative-dflash-block-size
        speculative-domino-candidate-pool-size speculative-dspark-block-size
        speculative-dspark-sps-table-path speculative-dspark-confidence-sts-path
        speculative-accept-threshold-single speculative-accept-threshold-acc
        speculative-token-map speculative-attention-mode speculative-draft-attention-backend
        speculative-dsa-topk-backend speculative-draft-kv-cache-dtype
        speculative-draft-window-size speculative-draft-sink-size speculative-moe-runner-backend
        speculative-moe-a2a-backend speculative-adaptive-config spec-trace-dir
        speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth
        speculative-ngram-match-type speculative-ngram-max-trie-depth speculative-ngram-capacity
        speculative-ngram-external-corpus-path speculative-ngram-external-sam-budget
        speculative-ngram-external-corpus-max-tokens uno-lora-path num-lookahead-slots
        decoupled-spec-bind-endpoint decoupled-spec-rank decoupled-spec-role""",
        lists="decoupled-spec-connect-endpoints",
    ),
    _group(
        "text is all that the model reads",
        switches="""language-model-only language-only mm-encoder-only enable-mm-embeds
        skip-mm-profiling interleave-mm-strings disable-chunked-mm-input mm-device-do-normalize
        trust-request-mm-kwargs disable-mm-preprocessor-cache enable-multimodal
        enable-broadcast-mm-inputs-process enable-prefix-mm-cache mm-enable-dp-encoder
        trust-mm-content-hashes enable-mm-global-cache disable-fast-image-processor
        enable-precise-embedding-interpolation keep-mm-feature-on-device
        enable-adaptive-dispatch-to-encoder enable-flash-late-interaction""",
        values="""allowed-local-media-path limit-mm-per-prompt mm-processor-cache-gb
        mm-processor-cache-type mm-hasher-algorithm mm-shm-cache-max-object-size-mb
        mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype
        mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin
        video-pruning-rate video-pruning-method mm-tensor-ipc mm-processor-device
        mm-ipc-gpu-memory-gb mm-attention-backend mm-process-config mm-processor-worker-num
        mm-io-worker-num media-url-max-file-size-mb mm-preprocess-cache-size-mb
        mm-max-concurrent-calls limit-mm-data-per-request image-processor-backend
        mm-global-cache-backend mm-feature-transport mm-per-request-timeout
        asr-max-buffer-seconds asr-max-concurrent-sessions encoder-transfer-backend""",
        lists="allowed-media-domains encoder-urls encoder-bootstrap-port encoder-register-urls",
        json="media-io-kwargs mm-processor-kwargs ec-transfer-config ec-manager-config",
    ),
    _group(
        "the prefix cache stays in the memory of the device",
        switches="""enable-hierarchical-cache enable-hicache enable-unified-cache-external-linker
        enable-linker-mla-dedup enable-lmcache enable-flexkv enable-hisparse
        enable-session-radix-cache enable-unified-memory strip-thinking-cache
        enable-streaming-session kv-cache-metrics""",
        values="""hicache-host-memory-mode hicache-ratio hicache-size
        hicache-host-memory-fraction hicache-write-policy hicache-io-backend hicache-mem-layout
        hicache-storage-backend hicache-storage-prefetch-policy
        hicache-storage-backend-extra-config hicache-storage-prefetch-retry-poll-interval
        hicache-storage-prefetch-retry-max-attempts unified-cache-external-linker-backend
        unified-cache-external-linker-config hisparse-config
        hierarchical-sparse-attention-extra-config lmcache-config-file flexkv-config-file
        radix-eviction-policy radix-eviction-policy-config radix-cache-backend kv-offloading-size
        kv-offloading-backend prefix-caching-hash-algo prefix-cache-retention-interval swap-space
        preemption-mode kv-cache-metrics-sample""",
        json="kv-events-config",
    ),
    _group(rules.TRANSFER, rule=rules.kv_transfer, json="kv-transfer-config"),
    _group(
        "requests run in order of arrival, prompts in chunks beside decodes",
        switches="""enable-prefill-delayer disable-priority-preemption
        schedule-low-priority-values-first long-prefill-token-threshold-adaptive
        scheduler-reserve-full-isl abort-on-priority-when-disabled multi-step-stream-outputs
        disable-async-output-proc prefill-only-disable-kv-cache enable-dynamic-batch-tokenizer
        enable-tokenizer-batch-encode disable-tokenizer-batch-decode""",
        values="""max-prefill-tokens prefill-max-requests schedule-policy
        schedule-conservativeness num-continuous-decode-steps prefill-decode-interval
        prefill-decode-interval-min-bs scheduler-recv-interval default-priority-value
        batch-notify-size priority-scheduling-preemption-threshold retraction-policy
        prefill-delayer-max-delay-passes max-num-active-seqs
        prefill-delayer-token-usage-low-watermark prefill-delayer-queue-min-ratio
        prefill-delayer-max-delay-ms min-free-slots-delay long-prefill-token-threshold
        max-num-partial-prefills max-long-partial-prefills max-num-scheduled-tokens
        num-scheduler-steps watermark prefill-schedule-interval
        dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout
        cuda-graph-max-bs-per-request""",
        lists="prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets",
    ),
    _group(
        "weights are read from safetensors by all ranks at once",
        switches="""weight-loader-disable-mmap weight-loader-drop-cache-after-load
        enable-cumem-allocator weight-loader-prefetch-checkpoints""",
        values="""safetensors-load-strategy safetensors-prefetch-num-threads
        safetensors-prefetch-block-size pt-load-map-location startup-weight-load-mode
        weight-loader-prefetch-num-threads model-checksum weight-cache-mode config-format
        weight-cache-socket weight-cache-timeout code-revision tokenizer-revision hf-config-path
        model-config-parser""",
        lists="ignore-patterns",
        json="model-loader-extra-config",
    ),
    _group(
        "the checkpoint's tokenizer runs in Rust",
        values="""tokenizer-mode tokenizer-backend tokenizer-pool-size tokenizer-pool-type
        tokenizer-pool-extra-config""",
    ),
    _group(
        "both forms of content are read, and the model's own template decides",
        values="""chat-template-content-format reasoning-effort-map
        anthropic-disabled-thinking-effort hf-chat-template-name""",
        json="reasoning-config",
    ),
    _group(
        "xgrammar follows grammars; `strict` is said by each request",
        switches="""disable-outlines-disk-cache enable-strict-thinking
        constrained-json-disable-any-whitespace""",
        values="""grammar-backend guided-decoding-backend constrained-json-whitespace-pattern
        tool-strict-level constrained-json-max-whitespace-cnt""",
        json="structured-outputs-config",
    ),
    _group(
        "requests say it: stream_options.include_usage",
        switches="enable-force-include-usage stream-response-default-include-usage",
    ),
    _group(
        "requests say it: leave `tools` out where no call is wanted",
        switches="exclude-tools-when-tool-choice-none",
    ),
    _group(
        "requests say it: return_token_ids, return_tokens_as_token_ids",
        switches="return-tokens-as-token-ids return-input-ids return-output-ids",
    ),
    _group("off unless --enable-log-requests is given", switches="disable-log-requests"),
    _group(
        "off unless --enable-access-log is given",
        switches="disable-uvicorn-access-log",
        values="disable-access-log-for-endpoints",
    ),
    _group(
        "--log-level says how much is logged, /metrics has the figures",
        switches="""enable-log-outputs enable-server-load-tracking log-error-stack show-time-cost
        enable-request-time-stats-logging aggregate-engine-logging
        enable-logging-iteration-details enable-per-request-metrics enable-mfu-metrics
        enable-trace enable-forward-pass-metrics export-metrics-to-file
        fail-on-environ-validation""",
        values="""uvicorn-log-level log-level-http log-requests-level log-requests-format
        decode-log-interval log-config-file show-hidden-metrics-for-version extra-metric-labels
        otlp-service-name load-snapshot-publish-interval load-publish-endpoint
        gc-warning-threshold-secs trace-modules tokenizer-metrics-custom-labels-header
        forward-pass-metrics-worker-id forward-pass-metrics-ipc-name stat-loggers
        export-metrics-to-file-dir fingerprint-mode fingerprint-value
        weight-version""",
        lists="""log-requests-target uvicorn-access-log-exclude-prefixes collect-detailed-traces
        bucket-time-to-first-token bucket-inter-token-latency bucket-e2e-request-latency
        prompt-tokens-buckets generation-tokens-buckets custom-histogram-buckets
        tokenizer-metrics-allowed-custom-labels""",
        json="logging-config",
    ),
    _group(
        "for measuring the inside of the other server (here: negamax bench)",
        switches="""enable-layerwise-nvtx-tracing enable-layerwise-nvtx-marker
        jit-monitor-verbose enable-trace-replay""",
        values="""jit-monitor-mode debug-tensor-dump-output-folder debug-tensor-dump-input-file
        msprobe-dump-config kv-canary kv-canary-real-data kv-canary-sweep-interval""",
        lists="debug-tensor-dump-layers forward-hooks warmups",
        json="profiler-config",
    ),
    _group(
        "the server has limits of its own, see --help",
        switches="enable-http-worker-reuseport enable-offline-docs enable-http2 allow-credentials",
        values="""h11-max-incomplete-event-size h11-max-header-count http2-max-concurrent-streams
        soft-watchdog-timeout http2-initial-connection-window-size shutdown-timeout
        file-storage-path""",
        lists="allowed-methods allowed-headers",
        json="watchdog-config",
    ),
    _group(
        "weights and memory stay as they were at start, until the server is restarted",
        switches="""enable-sleep-mode sleep-mode-offload-cudagraph enable-memory-saver
        enable-weights-cpu-backup enable-fault-tolerance""",
        values="sleep-mode-backend",
        lists="sleep-preserve-parameter-names",
    ),
    _group(
        "certificates are read at start: restart the server with a new one",
        switches="enable-ssl-refresh",
    ),
    _group("have the proxy strip the prefix", values="root-path fastapi-root-path"),
    _group(
        "for models of other families",
        switches="""enable-mamba-cache-stochastic-rounding enable-int8-mamba-checkpoint
        enable-linear-replayssm use-replayssm enable-linear-replayssm-spec
        enable-mamba-shared-prefix-checkpoint cohere-is-reasoning-model dllm-fdfo
        mlx-enable-sampling ple-offload-embedding""",
        values="""mamba-backend mamba-ssm-dtype mamba-ssu-algorithm mamba-cache-philox-rounds
        mamba-cache-dtype mamba-block-size mamba-ssm-cache-dtype mamba-cache-mode
        mamba-max-states-per-path mamba-radix-cache-strategy mamba-track-interval
        int8-mamba-ckpt-size linear-attn-backend linear-attn-decode-backend
        linear-attn-prefill-backend linear-attn-verify-backend linear-replayssm-cache-len
        replayssm-buffer-len max-mamba-cache-size mamba-full-memory-ratio dllm-algorithm
        dllm-algorithm-config cohere-format ple-offload-backend ple-offload-dir""",
        json="diffusion-config -dc",
    ),
)

_REFUSED = (
    _group(
        "",
        rule=rules.attention_data_parallel,
        values="attn-dp-size attention-data-parallel-size",
    ),
    _group("", rule=rules.replicas, values="dp-size dp"),
    _group("", rule=rules.local_ranks, values="data-parallel-size-local -dpl"),
    _group("", rule=rules.first_local_rank, values="data-parallel-start-rank -dpr"),
    _group("", rule=rules.renamed("--master-addr"), values="data-parallel-address -dpa"),
    _group("", rule=rules.renamed("--master-port"), values="data-parallel-rpc-port -dpp"),
    _group("", rule=rules.renamed("--nnodes"), values="-n"),
    _group(
        "",
        rule=rules.renamed("--cp-kv-cache-interleave-size"),
        values="dcp-kv-cache-interleave-size",
    ),
    _group("", rule=rules.renamed("--node-rank"), values="-r"),
    _group(
        "", rule=rules.ray, switches="use-ray worker-use-ray", values="data-parallel-backend -dpb"
    ),
    _group("", rule=rules.meeting_point, values="dist-init-addr"),
    _group("", rule=rules.headless, switches="headless"),
    _group(
        "experts are not copied",
        remedy="leave it out: all ranks share the experts",
        unless="0 1",
        values="moe-dp-size moe-data-parallel-size dwdp-size",
    ),
    _group(
        "one server balances all data-parallel ranks",
        remedy="use --data-parallel-size alone",
        unless="0 1",
        switches="""data-parallel-external-lb -dpe data-parallel-hybrid-lb -dph
        data-parallel-multi-port-external-lb -dpm enable-scale-out""",
        values="""data-parallel-rank -dpn data-parallel-supervisor-port
        dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
        dp-supervisor-probe-failure-threshold""",
    ),
    _group(
        "",
        rule=rules.attention_context_parallel,
        values="attn-cp-size attention-context-parallel-size",
    ),
    _group(
        "GPUs are chosen by the environment",
        remedy="set CUDA_VISIBLE_DEVICES",
        unless="0 1",
        values="base-gpu-id gpu-id-step",
    ),
    _group(
        "GPUs are chosen by the environment", remedy="set CUDA_VISIBLE_DEVICES", lists="device-ids"
    ),
    _group("tokens of the hub come from the environment", remedy="set HF_TOKEN", values="hf-token"),
    _group(
        "adapters are not loaded",
        remedy="merge the adapter into the checkpoint",
        switches="""enable-lora enable-lora-overlap-loading fully-sharded-loras
        enable-tower-connector-lora specialize-active-lora enable-mixed-moe-lora-format
        enable-moe-shared-loras experts-shared-outer-loras lora-use-virtual-experts
        lora-strict-loading enable-lora-bias""",
        values="""max-loras max-lora-rank lora-dtype max-cpu-loras max-lora-cls-labels
        max-loaded-loras max-loras-per-batch lora-eviction-policy lora-backend
        max-lora-chunk-size lora-drain-wait-threshold lora-extra-vocab-size""",
        lists="lora-modules lora-target-modules lora-paths prompt-adapters",
        json="default-mm-loras",
    ),
    _group(
        "weights run as the checkpoint stores them",
        remedy="leave it out; --quantization names a format",
        switches="allow-deprecated-quantization quantize-and-serve",
        values="""quantization-param-path modelopt-quant modelopt-checkpoint-restore-path
        modelopt-checkpoint-save-path modelopt-export-path rl-quant-profile torchao-config""",
        json="quantization-config",
    ),
    _group(
        "weights stay in the memory of the device",
        remedy="use more GPUs with --tensor-parallel-size",
        unless="0 0.0 1 uva prefetch cpu",
        switches="enable-paged-experts",
        values="""cpu-offload-gb cpu-offload-params offload-backend offload-group-size
        offload-num-in-group offload-prefetch-step offload-params offload-mode
        paged-experts-num-resident kt-weight-path kt-method kt-cpuinfer kt-threadpool-count
        kt-num-gpu-experts kt-max-deferred-experts-per-token kt-gpu-prefill-token-threshold""",
    ),
    _group(
        "the KV cache is sized in bytes or blocks",
        remedy="use --kv-cache-memory, or --num-kv-blocks with tokens / --block-size",
        values="max-total-tokens",
    ),
    _group(
        "sampling defaults are the checkpoint's",
        remedy="edit generation_config.json in a local folder, or send them with requests",
        unless="model",
        values="generation-config sampling-defaults preferred-sampling-params",
        json="override-generation-config",
    ),
    _group(
        "the model is what its config.json says",
        remedy="edit config.json in a local folder",
        values="rope-theta",
        json="hf-overrides model-class-overrides json-model-override-args rope-scaling",
    ),
    _group(rules.TOKENIZER, rule=rules.tokenizer, values="tokenizer tokenizer-path"),
    _group(
        "code from outside is not loaded",
        remedy="leave it out; see docs/parsing.md for the formats of MiniMax's models",
        values="""reasoning-parser-plugin tool-parser-plugin scheduler-cls worker-cls
        worker-extension-cls io-processor-plugin completion-template""",
        lists="logits-processors middleware custom-weight-loader",
    ),
    _group(
        "there are no tools on the server",
        remedy="declare `tools` in requests and run them in the client",
        values="tool-server sidecar",
        lists="sidecar-args",
    ),
    _group(
        "templates of requests are not run",
        remedy="use --chat-template FILE",
        switches="trust-request-chat-template",
    ),
    _group(
        "answers have the role assistant",
        remedy="leave it out",
        unless="assistant",
        values="response-role",
    ),
    _group(
        "prefill and decode run in one server",
        remedy="start one server without it",
        switches="""disaggregation-enable-kv-checksum disaggregation-decode-enable-radix-cache
        enable-pd-role-switch enable-pdmux disaggregation-decode-enable-offload-kvcache
        encoder-only""",
        values="""disaggregation-mode disaggregation-decode-allocation-policy
        disaggregation-transfer-backend sm-group-num disaggregation-bootstrap-port
        disaggregation-decode-retraction-backup num-reserved-decode-tokens pdmux-config-path
        disaggregation-decode-extra-slots disaggregation-decode-polling-interval
        optimistic-prefill-attempts disaggregation-decode-host-receive-threshold
        disaggregation-prefill-pp disaggregation-decode-tp""",
        lists="disaggregation-ib-device",
    ),
    _group(
        "the models served here generate text",
        remedy="leave it out",
        unless="generate",
        switches="is-embedding enable-mis",
        values="task runner convert",
        json="pooler-config override-pooler-config",
    ),
    _group(
        "weights and memory stay as they were at start",
        remedy="restart the server",
        switches="""delete-ckpt-after-loading checkpoint-engine-wait-weights-before-ready
        remote-instance-weight-loader-start-seed-via-transfer-engine""",
        values="""remote-instance-weight-loader-seed-instance-ip rl-on-policy-target
        modelexpress-config remote-instance-weight-loader-seed-instance-service-port
        remote-instance-weight-loader-backend engine-info-bootstrap-port decrypted-config-file
        decrypted-draft-config-file""",
        lists="remote-instance-weight-loader-send-weights-group-ports",
        json="weight-transfer-config",
    ),
    _group(
        "only HTTP on a TCP port is spoken",
        remedy="use --host and --port",
        switches="grpc smg-grpc-mode grpc-mode tokens-only",
        values="""uds grpc-port grpc-response-timeout-secs smg-http-sidecar-port
        grpc-http-sidecar-port""",
    ),
    _group(
        "TLS asks clients for no certificate, and its ciphers are OpenSSL's",
        remedy="put a proxy in front of the server",
        unless="0",
        values="ssl-ca-certs ssl-cert-reqs ssl-ciphers",
    ),
    _group(
        "TLS reads a key without a password",
        remedy="decrypt the key file",
        values="ssl-keyfile-password",
    ),
    _group(
        "answers have text, token ids and log-probabilities",
        remedy="leave it out",
        unless="raw_logprobs",
        switches="""enable-return-hidden-states enable-return-aux-hidden-states
        enable-return-routed-experts enable-return-indexer-topk return-sampling-mask
        enable-custom-logit-processor enable-prompt-embeds skip-tokenizer-init enable-watermark""",
        values="return-hidden-states-mode sampling-mask-max-tokens logprobs-mode",
        lists="return-aux-hidden-state-layer-ids",
        json="watermark-config aux-output-config",
    ),
    _group(
        "a prompt that is too long is refused (400), never cut",
        remedy="have clients shorten it",
        switches="allow-auto-truncate",
    ),
    _group(
        "the option has another name here",
        remedy="use --scheduling-policy priority",
        switches="enable-priority-scheduling",
    ),
    _group(
        "on GPUs the last bits of a logit may depend on the company of a request",
        remedy="leave it out; see docs/decisions/0003-batch-invariance.md",
        switches="enable-deterministic-inference",
    ),
)

TABLE: Mapping[str, Foreign] = {
    name: entry for group in (*_IGNORED, *_REFUSED) for name, entry in group
}
