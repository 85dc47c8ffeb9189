"""Code of other packages that calls das-adapter, or whose records it reads: no patch
changes it, and nothing of it is overridden. Where it changes, all names may be there,
and what das-adapter returns or reads is still wrong.

Of a function what it does counts, of a class the whole of it: name large classes by the
methods that matter.
"""

from __future__ import annotations

from das_adapter.sources import symbols

_VLLM_RECORDS = symbols("""
    vllm.v1.core.sched.output: SchedulerOutput CachedRequestData NewRequestData
    vllm.v1.outputs: ModelRunnerOutput SamplerOutput DraftTokenIds LogprobsTensors
    vllm.v1.engine: EngineCoreOutput EngineCoreRequest
    vllm.v1.request: Request.__init__ Request.append_output_token_ids
    vllm.v1.spec_decode.metadata: SpecDecodeMetadata
    vllm.v1.sample.metadata: SamplingMetadata
    vllm.v1.sample.logits_processor.interface: BatchUpdate
""")
_VLLM_CORE = symbols("""
    vllm.v1.core.sched.scheduler: Scheduler.schedule Scheduler._update_after_schedule
        Scheduler.update_draft_token_ids Scheduler.update_draft_token_ids_in_output
        Scheduler._update_request_with_output Scheduler._make_cached_request_data
    vllm.v1.core.sched.async_scheduler: AsyncScheduler
    vllm.v1.engine.core: EngineCore.step EngineCore.step_with_batch_queue
        EngineCore.post_step EngineCore.add_request EngineCore.abort_requests
    vllm.v1.engine.output_processor: OutputProcessor.process_outputs
    vllm.v1.worker.worker_base: WorkerWrapperBase.execute_model
        WorkerWrapperBase.update_environment_variables
    vllm.v1.worker.gpu_worker: Worker.init_device Worker.execute_model
        Worker.sample_tokens Worker.take_draft_token_ids
    vllm.config.speculative: SpeculativeConfig.__post_init__
        SpeculativeConfig._verify_args
    vllm.plugins: load_general_plugins
""")
_VLLM_V1 = symbols("""
    vllm.v1.worker.gpu_model_runner: GPUModelRunner._calc_spec_decode_metadata
        GPUModelRunner._bookkeeping_sync GPUModelRunner._copy_draft_token_ids_to_cpu
        GPUModelRunner._get_draft_token_ids_cpu
    vllm.v1.sample.sampler: Sampler.sample
    vllm.v1.spec_decode.custom_class_proposer: create_custom_proposer
    vllm.v1.spec_decode.llm_base_proposer: SpecDecodeBaseProposer.propose
""")
_VLLM_V2 = symbols("""
    vllm.v1.worker.gpu.model_runner: ExecuteModelState BatchReqState
        GPUModelRunner.load_model GPUModelRunner.capture_model
        GPUModelRunner.add_requests GPUModelRunner.update_requests
        GPUModelRunner.finish_requests GPUModelRunner.gather_batch_req_state
        GPUModelRunner.prepare_inputs GPUModelRunner.sample
        GPUModelRunner.postprocess_sampled GPUModelRunner.take_draft_token_ids
    vllm.v1.worker.gpu.input_batch: InputBatch InputBuffers
    vllm.v1.worker.gpu.spec_decode: init_speculator
    vllm.v1.worker.gpu.spec_decode.adaptive_verification:
        AdaptiveVerificationManager.__init__ AdaptiveVerificationManager.compact_batch
    vllm.v1.worker.gpu.spec_decode.utils: DraftTokensHandler.get_draft_tokens
    vllm.v1.worker.gpu.spec_decode.autoregressive.speculator:
        AutoRegressiveSpeculator.propose
    vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:
        TargetDependentARSpeculator.propose
    vllm.v1.worker.gpu.spec_decode.dflash.speculator: DFlashSpeculator.propose
    vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:
        StandaloneARSpeculator.propose
    vllm.v1.worker.gpu.sample.sampler: Sampler.__call__ Sampler.sample
    vllm.v1.worker.gpu.async_utils: AsyncOutput
    vllm.v1.worker.gpu.structured_outputs: StructuredOutputsWorker.apply_grammar_bitmask
        _build_grammar_mapping
""")
_VERL = symbols("""
    verl.workers.rollout.llm_server: LLMServerManager._init_global_load_balancer
        LLMServerClient._acquire_server LLMServerClient._release_server
    verl.workers.rollout.replica: TokenOutput RolloutReplicaRegistry
    verl.workers.rollout.vllm_rollout.vllm_async_server: vLLMReplica.launch_servers
        vLLMHttpServer.launch_server
    verl.experimental.agent_loop.agent_loop: AgentLoopWorker.generate_sequences
        get_trajectory_info AgentLoopManager.create
    verl.trainer.ppo.v1.agent_loop_tq: AgentLoopWorkerTQ.generate_sequences
    verl.trainer.ppo.v1.trainer_base: PPOTrainer.fit PPOTrainer.step
    verl.trainer.ppo.ray_trainer: RayPPOTrainer.fit RayPPOTrainer._get_gen_batch
""")
_NEMO_RL = symbols("""
    nemo_rl.models.generation.vllm.vllm_generation: VllmGeneration.__init__
    nemo_rl.models.generation.vllm.vllm_worker: BaseVllmGenerationWorker.__init__
    nemo_rl.models.generation.vllm.vllm_worker_async:
        VllmAsyncGenerationWorkerImpl.__init__
    nemo_rl.distributed.worker_groups: RayWorkerGroup.run_all_workers_single_data
        RayWorkerGroup.run_all_workers_sharded_data
    nemo_rl.experience.rollouts: run_multi_turn_rollout run_async_multi_turn_rollout
    nemo_rl.utils.checkpoint: CheckpointManager.finalize_checkpoint
        CheckpointManager.get_latest_checkpoint_path
""")

CALLERS = {
    "vllm": (*_VLLM_RECORDS, *_VLLM_CORE, *_VLLM_V1, *_VLLM_V2),
    "verl": _VERL,
    "nemo_rl": _NEMO_RL,
}
"""By host package."""
