"""Describe quantized checkpoints with the fields that each tool writes."""

from collections.abc import Mapping, Sequence
from typing import Any

Fields = dict[str, Any]

FP8: Fields = {
    "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}  # fmt: skip

# --- compressed-tensors, as LLM Compressor writes it ----------------------------------------------

TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_TOKENS = {**TOKENS, "type": "float"}
E4M3_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
E4M3_BLOCKS = {**E4M3_ROWS, "strategy": "block", "block_structure": [128, 128]}
INT8_ROWS = {"num_bits": 8, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4_INPUTS = {**NVFP4, "dynamic": "local"}


def mx(bits: int) -> Fields:
    return {"num_bits": bits, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}


def group(
    weights: Mapping[str, Any], *, targets: Sequence[str] = ("Linear",), inputs: Any = None,
    stored: str | None = None,
) -> Fields:  # fmt: skip
    usual = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": None,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
        "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None,
    }  # fmt: skip
    return {
        "targets": list(targets), "weights": {**usual, **weights}, "input_activations": inputs,
        "output_activations": None, "format": stored,
    }  # fmt: skip


def compressed(stored: str, *groups: Fields, ignore: Sequence[str], **more: Any) -> Fields:
    return {
        "quant_method": "compressed-tensors", "format": stored, "ignore": list(ignore),
        "config_groups": {f"group_{number}": each for number, each in enumerate(groups)},
        "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {},
        "transform_config": {}, "global_compression_ratio": None, "version": "0.12.2", **more,
    }  # fmt: skip


def spin_quant(ignore: Sequence[str], location: str = "weight_input") -> Fields:
    steps = [
        {"targets": ["re:.*o_proj$"], "location": "weight_output", "inverse": False, "ignore": []},
        {"targets": ["re:.*q_proj$"], "location": location, "inverse": True, "ignore": []},
    ]
    r1 = {"type": "hadamard", "apply": steps, "randomize": False, "requires_grad": False}
    int4 = group({"group_size": 32}, stored="pack-quantized")
    rotations = {"config_groups": {"R1": r1}}
    return compressed("pack-quantized", int4, ignore=ignore, transform_config=rotations)


# --- AutoAWQ, GPTQModel, AutoRound ----------------------------------------------------------------


def awq(plain: Sequence[str], group_size: int = 128) -> Fields:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm",
        "zero_point": True, "backend": "autoawq", "do_fuse": False, "exllama_config": None,
        "fuse_max_seq_len": None, "modules_to_fuse": None, "modules_to_not_convert": list(plain),
    }  # fmt: skip


def gptq(**changes: Any) -> Fields:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32",
        "static_groups": False, "true_sequential": True, "damp_percent": 0.05,
        "model_name_or_path": "", "dataset": None, "model_file_base_name": "model",
        "meta": {"quantizer": ["gptqmodel:5.6.0"], "mse": 0.0}, **changes,
    }  # fmt: skip


def auto_round(packing: str = "auto_round:auto_gptq", **changes: Any) -> Fields:
    return {
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 128,
        "sym": True, "data_type": "int", "autoround_version": "0.9.3", "batch_size": 8,
        "iters": 200, "nsamples": 512, "seqlen": 2048, "low_gpu_mem_usage": True,
        "block_name_to_quantize": "model.layers", "extra_config": {}, **changes,
    }  # fmt: skip


def auto_round_floats(
    data_type: str, bits: int, size: Any, *, plain: Sequence[str], **more: Any
) -> Fields:
    left_out = {"bits": 16, "act_bits": 16, "data_type": "float", "act_data_type": "float"}
    return {
        "quant_method": "auto-round", "autoround_version": "0.16.1", "bits": bits, "sym": True,
        "data_type": data_type, "group_size": size, "block_name_to_quantize": "model.layers",
        "act_bits": bits, "act_data_type": data_type, "act_dynamic": True, "act_sym": True,
        "act_group_size": size, "enable_quanted_input": False,
        "extra_config": dict.fromkeys(plain, left_out), **more,
    }  # fmt: skip


# --- Model Optimizer ------------------------------------------------------------------------------

PRODUCER = {"name": "modelopt", "version": "0.43.0rc2"}


def modelopt(algorithm: str | None, ignore: Sequence[str], **more: Any) -> Fields:
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_scheme": None,
        "ignore": list(ignore), "producer": PRODUCER, **more,
    }  # fmt: skip


def modelopt_file(exclude: Sequence[str], cache: str | None = None) -> Fields:
    quantization = {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": cache, "group_size": 16,
        "exclude_modules": list(exclude),
    }  # fmt: skip
    return {"producer": PRODUCER, "quantization": quantization}


# In MiniMax-M3.1, experts are NVFP4 and other matrices are MXFP8.
M31: Fields = {
    "quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic",
    "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized", "group_size": 16,
    "kv_cache_quant_algo": "FP8", "attention_quant_algo": "FP8", "index_k_quant_type": "nvfp4",
}  # fmt: skip


def modelopt_mixed(algorithms: Mapping[str, str], exclude: Sequence[str]) -> Fields:
    layers = {
        name: {"quant_algo": each, **({"group_size": 16} if each == "NVFP4" else {})}
        for name, each in algorithms.items()
    }
    return {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
        "exclude_modules": list(exclude), "quantized_layers": layers,
    }  # fmt: skip


# --- Quark ----------------------------------------------------------------------------------------

QUARK_E4M3 = {
    "dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "ch_axis": None,
    "group_size": None, "block_size": None, "symmetric": None, "round_method": "half_even",
    "observer_cls": "PerTensorMinMaxObserver",
}  # fmt: skip
QUARK_E4M3_ROWS = {**QUARK_E4M3, "qscheme": "per_channel", "ch_axis": 0}
QUARK_INT8_ROWS = {**QUARK_E4M3_ROWS, "dtype": "int8", "symmetric": True}
QUARK_MXFP4 = {
    **QUARK_E4M3, "dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32,
    "scale_type": "float", "scale_format": "e8m0", "scale_calculation_mode": "even",
    "mx_element_dtype": None, "observer_cls": "PerBlockMXObserver", "is_scale_quant": False,
}  # fmt: skip
QUARK_NVFP4 = [{**QUARK_MXFP4, "group_size": 16, "scale_format": None}, QUARK_E4M3]


def dynamic(weight: Mapping[str, Any]) -> Fields:
    return {**weight, "is_dynamic": True}


def quark_layer(weight: object, inputs: object = None, outputs: object = None) -> Fields:
    return {
        "weight": weight, "input_tensors": inputs, "output_tensors": outputs, "bias": None,
        "target_device": None,
    }  # fmt: skip


def quark(weight: object, inputs: object = None, *, exclude: Sequence[str], **more: Any) -> Fields:
    return {
        "quant_method": "quark", "global_quant_config": quark_layer(weight, inputs),
        "algo_config": None, "softmax_quant_spec": None, "layer_type_quant_config": {},
        "layer_quant_config": {}, "exclude": list(exclude), "kv_cache_quant_config": {},
        "kv_cache_post_rope": False, "quant_mode": "eager_mode", "version": "0.12",
        "export": {
            "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
            "weight_format": "real_quantized", "weight_merge_groups": None,
        }, **more,
    }  # fmt: skip


# --- ModelSlim ------------------------------------------------------------------------------------


def modelslim(types: Mapping[str, str], kind: str = "W8A8_DYNAMIC", **more: Any) -> Fields:
    rotation = {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}
    return {
        "model_quant_type": kind, "version": "1.0.0", "group_size": 0, "metadata": {},
        "optional": {"quarot": rotation}, **types, **more,
    }  # fmt: skip
