"""All parts of vLLM that this package reaches though they are not public API: that they are there, and no others used.

A new release of vLLM is tried by raising `internals.NEWEST`: what it has moved is named here.
"""

import ast
import builtins
import ctypes
import dis
import gc
import importlib
import inspect
import logging
import os
import re
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, PretrainedConfig

from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.patches import PATCHES

_PROPOSE = (
    "propose(input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, "
    "num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state, dummy_run, "
    "skip_attn_for_dummy_run, mm_inputs, is_profile, num_speculative_tokens); draft_logits"
)
_CACHE_UPDATE = "do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)"
_LAYERWISE = "model_executor.model_loader.reload.layerwise"

REQUIRED: dict[str, str] = {
    # Modules and classes below `vllm`: their attributes, and their functions with all parameters but `self`.
    "v1.engine.llm_engine.LLMEngine": (
        "engine_core; output_processor; vllm_config; from_vllm_config; add_request; abort_request; collective_rpc; "
        "reset_prefix_cache; sleep; wake_up; has_unfinished_requests(); step()"
    ),
    "engine.arg_utils.EngineArgs": "create_engine_config(usage_context, headless); disable_log_stats",
    "usage.usage_lib.UsageContext": "ENGINE_CONTEXT",
    "config.VllmConfig": "model_config; cache_config; parallel_config; scheduler_config; speculative_config; "
    "compilation_config; quant_config; additional_config; use_v2_model_runner",
    "config.ModelConfig": "model; dtype; max_model_len; get_vocab_size()",
    "config.CacheConfig": "cache_dtype; num_gpu_blocks; kv_cache_memory_bytes",
    "config.ParallelConfig": "tensor_parallel_size",
    "config.SchedulerConfig": "async_scheduling; max_num_seqs",
    "config.SpeculativeConfig": "draft_model_config",
    "config.CompilationConfig": "cudagraph_capture_sizes",
    "config.CUDAGraphMode": "FULL; NONE; PIECEWISE; decode_mode(); mixed_mode(); separate_routine()",
    "compilation.cuda_graph.CUDAGraphWrapper": "unwrap(); clear_all_graphs()",
    "envs": "VLLM_CACHE_ROOT; VLLM_USE_V2_MODEL_RUNNER",
    "v1.engine.output_processor.OutputProcessor": "tokenizer; request_states; external_req_ids",
    "v1.engine.output_processor.RequestState": (
        "make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, "
        "ec_transfer_params, error)"
    ),
    "v1.engine.FinishReason": "ABORT",
    "v1.engine.core_client.InprocClient": "engine_core; shutdown(timeout)",
    "v1.engine.core.EngineCore": "scheduler; model_executor; batch_queue",
    "v1.executor.uniproc_executor.UniProcExecutor": (
        "driver_worker; vllm_config; shutdown(); _distributed_args(); execute_model(scheduler_output, non_block); "
        "determine_available_memory(); get_kv_cache_specs()"
    ),
    "v1.worker.worker_base.WorkerWrapperBase": "worker",
    "v1.worker.gpu_worker.Worker": "model_runner; vllm_config; reload_weights; sleep(level)",
    "v1.kv_cache_interface.FullAttentionSpec": "max_memory_usage_bytes(vllm_config); page_size_bytes",
    "v1.kv_cache_interface.KVCacheConfig": "kv_cache_groups",
    "v1.kv_cache_interface.KVCacheGroupSpec": "layer_names",
    "distributed.parallel_state": "destroy_distributed_environment(); _WORLD; get_tp_group(); "
    "model_parallel_is_initialized(); cleanup_dist_env_and_memory(shutdown_ray)",
    "v1.worker.gpu.shutdown": "free_before_shutdown(vllm_config)",
    "distributed.parallel_state.GroupCoordinator": "cpu_group; mq_broadcaster",
    "distributed.device_communicators.shm_broadcast.MessageQueue": "handle; _is_writer",
    "distributed.device_communicators.shm_broadcast.Handle": "local_subscribe_addr; local_notify_addr",
    "v1.core.sched.scheduler.Scheduler": (
        "running; waiting; requests; max_num_running_reqs; kv_cache_manager; block_size; dynamic_sd_lookup; "
        "has_requests(); "
        "schedule(throttle_prefills); update_draft_token_ids(draft_token_ids); "
        "update_from_output(scheduler_output, model_runner_output); reset_prefix_cache(reset_running_requests, "
        "reset_connector)"
    ),
    "v1.core.kv_cache_manager.KVCacheManager": "block_pool; kv_cache_config",
    "v1.core.block_pool.BlockPool": "get_num_free_blocks()",
    "v1.core.sched.async_scheduler.AsyncScheduler": "schedule(throttle_prefills)",
    "v1.core.sched.request_queue.FCFSRequestQueue": "clear; extend",
    "v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens; total_num_scheduled_tokens; scheduled_spec_decode_tokens; finished_req_ids; "
        "preempted_req_ids"
    ),
    "v1.outputs.ModelRunnerOutput": "req_id_to_index; sampled_token_ids",
    "v1.outputs.DraftTokenIds": "req_ids; draft_token_ids",
    "v1.request.Request": (
        "request_id; num_tokens; num_output_tokens; num_stale_output_tokens; drop_stale_output; is_prefill_chunk; "
        "all_token_ids; num_preemptions; cache_salt; block_hashes; update_block_hashes()"
    ),
    _LAYERWISE: (
        "initialize_layerwise_reload(model); finalize_layerwise_reload(args, kwargs); "
        "finalize_layerwise_processing(model, model_config); get_layerwise_info(layer); LAYERWISE_INFO"
    ),
    "model_executor.model_loader.reload.types.LayerReloadingInfo": "loaded_weights; load_numel",
    "model_executor.models.registry": "_run_in_subprocess(fn)",
    "model_executor.models.transformers.base.Base": (
        "_decorate_cls_for_torch_compile(cls, dynamic_arg_dims, enable_if, is_encoder)"
    ),
    # Quantization while weights arrive.
    "model_executor.layers.quantization.online.base.OnlineQuantizationConfig": "quantized_layer_summaries",
    "model_executor.layers.quantization.online.fp8.Fp8PtpcOnlineLinearMethod": "fp8_linear",
    "platforms.interface.Platform": "is_cpu()",
    "v1.sample.rejection_sampler": (
        "expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to); _expand"
    ),
    "model_executor.layers.vocab_parallel_embedding": "get_masked_input_and_mask",
    "v1.worker.gpu_model_runner": "update_num_computed_tokens_for_batch_change",
    "v1.sample.ops.logprobs": "batched_count_greater_than",
    "v1.sample.sampler": "batched_count_greater_than",
    "model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": (
        "_setup_kernel(layer, w13, w2); moe_kernel"
    ),
    "model_executor.layers.fused_moe.modular_kernel.FusedMoEKernel": "fused_experts",
    "model_executor.layers.fused_moe.modular_kernel.FusedMoEExperts": "process_weights_after_loading(layer)",
    # Which part of a layer a rank of a tensor-parallel engine holds.
    "model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding": (
        "shard_indices; tp_rank; tp_size; quant_method"
    ),
    "model_executor.layers.vocab_parallel_embedding.VocabParallelEmbeddingShardIndices": (
        "org_vocab_start_index; org_vocab_end_index"
    ),
    "model_executor.layers.linear.LinearBase": "tp_rank; tp_size; input_size; quant_method",
    "model_executor.layers.linear.ColumnParallelLinear": "input_size_per_partition; output_size_per_partition",
    "model_executor.layers.linear.RowParallelLinear": "input_size_per_partition; output_size_per_partition",
    "model_executor.layers.linear.QKVParallelLinear": "num_kv_head_replicas",
    "v1.worker.cpu_model_runner.CPUModelRunner": (
        "reload_weights(weights_iterator, weights_path, is_checkpoint_format); get_model()"
    ),
    # The V1 runner and its drafter.
    "v1.worker.gpu_model_runner.GPUModelRunner": (
        "drafter; input_batch; max_num_reqs; speculative_config; discard_request_mask; "
        "_get_spec_decode_draft_probs(spec_decode_metadata); _sample(logits, spec_decode_metadata); "
        "execute_model(scheduler_output, intermediate_tensors); sample_tokens(grammar_output)"
    ),
    "v1.worker.gpu_input_batch.InputBatch": "req_ids; req_id_to_index; num_reqs; generators",
    "v1.utils.CpuGpuBuffer": "np",
    "v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer": (
        "model; block_size; _last_draft_probs; propose(num_speculative_tokens, target_token_ids, target_positions, "
        "target_hidden_states, next_token_ids, token_indices_to_sample, common_attn_metadata, sampling_metadata, "
        "mm_embed_inputs, num_rejected_tokens_gpu, slot_mappings)"
    ),
    "v1.spec_decode.metadata.SpecDecodeMetadata": "max_spec_len; num_draft_tokens; draft_token_ids",
    "v1.attention.backend.CommonAttentionMetadata": "max_query_len; num_reqs; block_table_tensor",
    # The head's keys and values, written without running it.
    "model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM": (
        "model; config; lm_head; draft_id_to_target_id; load_weights(weights); compute_logits(hidden_states); "
        "combine_hidden_states(hidden_states)"
    ),
    "model_executor.models.llama_eagle3.LlamaModel": "layers; embed_tokens",
    "model_executor.models.llama_eagle3.LlamaDecoderLayer": "self_attn; input_layernorm; _residual_norm",
    "model_executor.models.llama.LlamaAttention": "qkv_proj; rotary_emb; q_size; kv_size; attn",
    "model_executor.layers.attention.attention.Attention": "impl; kv_cache; num_kv_heads; head_size",
    "v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": _CACHE_UPDATE,
    "v1.attention.backends.cpu_attn.CPUAttentionBackend": "get_supported_head_sizes()",
    # The V2 runner, its speculators and graphs.
    "v1.worker.gpu.model_runner.GPUModelRunner": (
        "speculator; rejection_sampler; req_states; max_num_reqs; cudagraph_manager; get_model(); "
        "capture_model(profile_only)"
    ),
    "v1.worker.gpu.states.RequestState": "draft_tokens; all_token_ids; total_len; req_id_to_index",
    "v1.worker.gpu.input_batch.InputBatch": (
        "req_ids; num_reqs; idx_mapping; has_prefill; num_scheduled_tokens; positions"
    ),
    "v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler": (
        "sampler; num_speculative_steps; _verify(logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, "
        "idx_mapping_np, expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled)"
    ),
    "v1.worker.gpu.sample.sampler.Sampler": (
        "sample(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos, "
        "seq_lens_upper_bound_np, return_logprobs)"
    ),
    "v1.worker.gpu.buffer_utils.StagedWriteTensor": "gpu",
    "v1.worker.gpu.block_table.BlockTables": "block_sizes; block_tables",
    "v1.worker.gpu.sample.gumbel": (
        "gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, "
        "logits_cache, logits_cache_col, use_fp64, logits_cache_source)"
    ),
    "v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator": (
        "sample_draft(hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits, "
        "spec_step_idx); compute_draft_logits(hidden_states, spec_step_idx); vllm_config; use_fp64_gumbel"
    ),
    "v1.worker.gpu.spec_decode.ngram.speculator.NgramGPUSpeculator": _PROPOSE,
    "v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator": "query_cudagraph_manager",
    "v1.worker.gpu.spec_decode.dspark.speculator.DSparkSpeculator": (
        "_d2t_scatter_index; _draft_scatter_buf; _sample_logits(logits, idx_map, sample_pos, step)"
    ),
    "model_executor.models.qwen3_dflash.DFlashQwen3Model": (
        "_build_fused_kv_buffers(); "
        "precompute_and_store_context_kv(context_states, context_positions, context_slot_mapping)"
    ),
    "v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator": _PROPOSE
    + "; model; draft_attn_layer_names; kv_cache_config; block_tables; supports_decode_metadata_update; "
    "prefill_cudagraph_manager; decode_cudagraph_manager",
    "v1.worker.gpu.cudagraph_utils.CudaGraphManager": (
        "graphs; cudagraph_mode; decode_query_len; compilation_config; _candidates; _capture_descs; "
        "_max_full_descs_to_capture; _init_candidates(); capture(create_forward_fn, progress_bar_desc); "
        "release_graphs(); "
        "dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches)"
    ),
    "v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor": "cg_mode; num_tokens; num_reqs; uniform_token_count",
    "v1.worker.gpu.cudagraph_utils": "ModelCudaGraphManager",
    "v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorBatchDescriptor": "num_speculative_tokens",
    "v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager": (
        "specialize_spec_tokens(desc, num_speculative_tokens)"
    ),
    "v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder": (
        "build(common_prefix_len, common_attn_metadata, fast_build); max_num_splits; num_heads_kv; device"
    ),
    "v1.attention.backends.flash_attn.FlashAttentionImpl": _CACHE_UPDATE,
    # Memory that sleeps.
    "device_allocator.cumem": "create_and_map(allocation_handle)",
    "device_allocator.cumem.CuMemAllocator": (
        "pointer_to_data; get_instance(); release_pools(); get_current_usage(); _python_free_callback(ptr)"
    ),
    "device_allocator.AllocationData": "handle; tag; is_asleep",
}


PACKAGE = Path(internals.__file__).parents[2]
ROOM = PACKAGE / "engine/vllm"
# Whose attributes are not vLLM's, nor this package's own.
OTHERS: tuple[Any, ...] = (
    *(torch, torch.Tensor, torch.nn, torch.nn.Module, torch.cuda, torch.cpu, torch.distributed, torch.linalg, torch._C),
    *(torch.Generator, torch.version, np, np.ndarray, PretrainedConfig, AutoModelForCausalLM),
    *(builtins, type, str, list, dict, set, object, Counter, Path, Version, re.Pattern),
    *(gc, importlib, inspect, inspect.BoundArguments, logging, sys, os, time),
    *(inspect.Signature, logging.Logger, ExitStack, zlib, BaseException, ctypes, ctypes.c_uint64, struct),
)
OF_OTHERS = {
    *("multi_processor_count", "layer_types", "layers_block_type", "rope_parameters", "rope_scaling"),
    *("_torchdynamo_orig_callable", "levelno"),  # the second of a record of a log
    "_cuda_clearCublasWorkspaces",
    *("from_address", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),  # of ctypes and CUDA's driver
}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu"])
def test_supported_versions_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "installed_version", lambda: Version(version))
    internals.check_version()


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_other_versions_are_refused_with_the_supported_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "installed_version", lambda: Version(version))
    with pytest.raises(ImportError, match=r">=0\.32\.0,<0\.33\.0"):
        internals.check_version()


def test_a_missing_internal_names_itself_and_the_supported_versions() -> None:
    with pytest.raises(RuntimeError, match=r"missing: `moved`.*>=0\.32\.0"):
        internals.reach(internals, "reach.moved")


@pytest.mark.vllm
def test_all_that_is_reached_inside_vllm_is_there_with_its_parameters() -> None:
    assert moved(REQUIRED) == []


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("v1.core.sched.scheduler.Scheduler", "walking"),
        ("v1.core.sched.scheduler.Scheduler", "append"),  # read there, of lists, and never assigned
        ("v1.core.sched.scheduler.Scheduler", "schedule()"),
        ("v1.core.sched.scheduler.Scheduler", "schedule(throttle)"),
        ("v1.core.sched.scheduler.Planner", "schedule(throttle_prefills)"),
        ("v1.core.plan", "anything"),
    ],
)
def test_a_name_or_a_parameter_that_has_moved_is_seen(place: str, name: str) -> None:
    assert moved({place: name}) == [f"{place}: {name}"]


def moved(required: Mapping[str, str]) -> list[str]:
    """Return what of `required`, names below `vllm`, is gone or has other parameters."""
    owners = {place: _import(f"vllm.{place}") for place in required}
    return [
        f"{place}: {name}"
        for place, names in required.items()
        for name in names.split("; ")
        if not _has(owners[place], name)
    ]


def _import(path: str) -> Any:
    """Return the module or class at a dotted path; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None) or importlib.import_module(path)
    except ImportError:
        return None


def _has(owner: Any, wanted: str) -> bool:
    name, call, parameters = wanted.rstrip(")").partition("(")
    if call:
        function = getattr(owner, name, None)
        return callable(function) and [
            parameter for parameter in inspect.signature(function).parameters if parameter != "self"
        ] == [parameter for parameter in parameters.split(", ") if parameter]
    return owner is not None and (hasattr(owner, name) or _assigns(owner, name))


@cache
def _assigns(owner: Any, name: str) -> bool:
    """Return whether a class annotates an attribute, or its methods, or a module's functions, assign it."""
    for base in getattr(owner, "__mro__", (owner, object))[:-1]:
        if name in vars(base).get("__annotations__", {}):
            return True
        for method in filter(inspect.isfunction, vars(base).values()):
            inside = [cell.cell_contents for cell in method.__closure__ or ()]  # decorated
            for function in filter(inspect.isfunction, [method, *inside]):
                if name in function.__code__.co_names and name in _stored(function):  # few are read through
                    return True
    return False


def _stored(function: FunctionType) -> set[str]:
    return {each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR"}


def attributes(path: Path) -> Iterator[str]:
    """Yield the attributes that a file reads, by dots or by the names in `reach`, `getattr` and `hasattr`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if node.func.id in {"reach", "getattr", "hasattr"} and isinstance(name, ast.Constant):
                yield from name.value.split(".")


def own_names(path: Path) -> Iterator[str]:
    """Yield the names that a file of ours defines, attributes of `self` among them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@pytest.mark.vllm
def test_every_attribute_of_vllm_that_is_used_is_among_those_that_are_checked() -> None:
    from vllm import RequestOutput, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    public = (SamplingParams, RequestOutput, RequestOutputKind)
    known = {name for path in PACKAGE.rglob("*.py") for name in own_names(path)} | OF_OTHERS
    known |= {name for each in (*public, *OTHERS) for name in dir(each)}
    known |= set(re.findall(r"\w+", " ".join([*REQUIRED.values(), *(key.rpartition(".")[2] for key in REQUIRED)])))
    used = {(name, path.name) for path in ROOM.rglob("*.py") for name in attributes(path)}
    assert sorted(pair for pair in used if pair[0] not in known) == []


def test_all_that_repairs_stand_around_is_among_what_is_checked() -> None:
    places = [place.removeprefix("vllm.").rpartition(".") for patch in PATCHES for place in patch.around]
    of_vllm = [(owner, name) for owner, _, name in places if owner != "torch.cuda.graph" and name != "__init__"]
    assert [(owner, name) for owner, name in of_vllm if not re.search(rf"\b{name}\b", REQUIRED.get(owner, ""))] == []
