"""A small GPT of Megatron's own classes under any parallelism, with any of its optimizers, and a step of its schedule."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

parallel: Any = import_module("megatron.core.parallel_state")
ddp: Any = import_module("megatron.core.distributed")
gpt: Any = import_module("megatron.core.models.gpt.gpt_model")
specs: Any = import_module("megatron.core.models.gpt.gpt_layer_specs")
optimizers: Any = import_module("megatron.core.optimizer")
configs: Any = import_module("megatron.core.transformer")
schedules: Any = import_module("megatron.core.pipeline_parallel.schedules")
seeds: Any = import_module("megatron.core.tensor_parallel.random")
gradients: Any = import_module("megatron.core.distributed.finalize_model_grads")

WORDS, LENGTH, BATCH = 40, 8, 2


class Job:
    """A model and its optimizer.

    Args:
        tp, pp, ep: sizes of tensor, pipeline and expert parallelism; data parallelism has the other ranks.
        distributed: whether the optimizer is Megatron's distributed one.
        bf16: whether parameters are bfloat16, and the optimizer has float32 copies.
        experts: of each layer; none is a plain SwiGLU. With *tp* they need layers that do not run on a CPU.
        tied: whether the output layer is the embedding.
        padded: words of the vocabulary with the padding.
    """

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        *,
        distributed: bool = True,
        bf16: bool = False,
        experts: int | None = None,
        tied: bool = True,
        padded: int = WORDS,
        dropout: float = 0.0,
        seed: int = 7,
    ) -> None:
        make_groups(tp, pp, ep)
        torch.manual_seed(seed)
        seeds.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        config = configs.TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=24,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            num_moe_experts=experts,
            moe_token_dispatcher_type="allgather",
            use_cpu_initialization=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            attention_dropout=dropout,
            hidden_dropout=dropout,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
            deterministic_mode=False,
        )
        plain = gpt.GPTModel(
            config=config,
            transformer_layer_spec=specs.get_gpt_layer_local_spec(num_experts=experts),
            vocab_size=padded,
            max_sequence_length=LENGTH,
            pre_process=parallel.is_pipeline_first_stage(),
            post_process=parallel.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
        )
        if bf16:
            plain = import_module("megatron.core.transformer.module").Float16Module(config, plain)
        self.model = ddp.DistributedDataParallel(
            config, ddp.DistributedDataParallelConfig(use_distributed_optimizer=distributed), plain
        )
        self.config = config
        self.optimizer = optimizers.get_megatron_optimizer(
            optimizers.OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=1e-3,
                weight_decay=0.1,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=distributed,
                clip_grad=1.0,
            ),
            [self.model],
        )
        config.finalize_model_grads_func = gradients.finalize_model_grads
        config.no_sync_func = self.model.no_sync

    def step(self, number: int) -> float:
        """Train on the data of a step; return the loss, on the last stage of the pipeline."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + parallel.get_data_parallel_rank())
        tokens = torch.randint(0, WORDS, (2, BATCH, LENGTH + 1), generator=generator)
        losses = schedules.get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(tokens),
            model=[self.model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        done, _, _ = self.optimizer.step()
        assert done
        return sum(float(one["loss"]) for one in losses)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters of this rank."""
        return {name: one.detach().clone() for name, one in self.model.named_parameters()}


def make_groups(tp: int, pp: int, ep: int) -> None:
    """Make Megatron's process groups, which are many, where others are there."""
    if parallel.model_parallel_is_initialized():
        sizes = parallel.get_tensor_model_parallel_world_size(), parallel.get_pipeline_model_parallel_world_size()
        if (*sizes, parallel.get_expert_model_parallel_world_size()) == (tp, pp, ep):
            return
        parallel.destroy_model_parallel()
    parallel.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)


def _forward(data: Any, model: Any) -> Any:
    tokens = next(data)
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    losses = model(tokens[:, :-1], places, None, labels=tokens[:, 1:])
    return losses, partial(_loss)


def _loss(losses: torch.Tensor) -> Any:
    mean = losses.float().mean()
    return mean, {"loss": mean.detach()}


def start(rank: int, world_size: int, store: str) -> None:
    """Join the process group."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")


def random_state() -> Any:
    """Return the random generators of this rank as Megatron's trainer saves them: one for each place of the model."""
    mapping = import_module("megatron.core.dist_checkpointing.mapping")
    tp, pp = parallel.get_tensor_model_parallel_rank(), parallel.get_pipeline_model_parallel_rank()
    sizes = parallel.get_pipeline_model_parallel_world_size(), parallel.get_tensor_model_parallel_world_size()
    found = [{"torch": torch.get_rng_state(), "tracker": seeds.get_cuda_rng_tracker().get_states()}]
    return mapping.ShardedObject(
        "rng_state", found, sizes, (pp, tp), replica_id=parallel.get_data_parallel_rank(with_context_parallel=True)
    )


def set_random_state(found: Any) -> None:
    torch.set_rng_state(found[0]["torch"])
    seeds.get_cuda_rng_tracker().set_states(found[0]["tracker"])


def unwrapped(job: Job) -> Any:
    """Return the model without what Megatron wraps around it."""
    model = job.model
    while hasattr(model, "module"):
        model = model.module
    return model
