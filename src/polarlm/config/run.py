"""A run, as a user writes it: the sections of the YAML file and what each field means."""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from polarlm.config.model import ModelConfig
from polarlm.config.section import Many, Section, Size

_A_YEAR_S = 31_536_000  # a system's timer takes no end of seconds
_Decay = Annotated[float, Field(ge=0, lt=1)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


def _in_lower_case(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev"
]


class DataConfig(Section):
    """Where the tokens come from."""

    paths: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)] = Field(
        ["synthetic"], description="prefixes of datasets, `0.3 data/wiki` for weights; or `synthetic` for random ids"
    )
    file_list: str | None = Field(None, description="a file of lines `weight prefix corpus`, instead of paths")
    tokenizer: str | None = Field(
        None, description="`bytes`, or a tokenizer's folder or file; by default the one the data was prepared with"
    )
    split: list[Annotated[float, Field(ge=0, le=1e15)]] = Field(
        [969, 30, 1], min_length=3, max_length=3, description="documents for training : validation : test"
    )
    mask_documents: bool = Field(False, description="tokens attend only within their own document")
    samples: Literal["stream", "documents"] = Field(
        "stream", description="windows of train.seq_len over all tokens, or each document alone, padded"
    )
    group_by_length: bool = Field(False, description="documents of like length make a global batch: less is padded")

    @property
    def is_synthetic(self) -> bool:
        """Random ids, drawn as they are needed."""
        return self.file_list is None and self.paths == ["synthetic"]

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.file_list is not None and "paths" in self.model_fields_set and self.paths != ["synthetic"]:
            raise ValueError("file_list: give data.paths or data.file_list, not both")
        if self.file_list is None and "synthetic" in self.paths and len(self.paths) > 1:
            raise ValueError("paths: synthetic data is not blended with other data")
        if self.samples == "documents" and self.is_synthetic:
            raise ValueError("samples: synthetic data has no documents; use stream, or give data.paths")
        if self.samples == "documents" and self.mask_documents:
            raise ValueError("mask_documents: where data.samples is documents, each is alone already; leave it out")
        if self.samples == "stream" and self.group_by_length:
            raise ValueError("group_by_length: samples of a stream are of one length; use data.samples documents")
        return self


class OptimizerConfig(Section):
    """What turns gradients into steps."""

    name: Literal["adamw", "muon", "adafactor"] = Field("adamw", description="which one; decay is on matrices only")
    lr: PositiveFloat = Field(3e-4, description="peak learning rate")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.1, description="decoupled weight decay")
    clip: NonNegativeFloat = Field(1.0, description="largest gradient norm; 0 is no clipping")
    fused: bool = Field(True, description="AdamW's steps in one kernel a parameter; else in several over all of them")


class ScheduleConfig(Section):
    """The learning rate over the run; warm-up is counted in optimizer steps."""

    name: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = Field(
        "cosine", description="shape after the warm-up"
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warm-up; the peak is reached at this step")
    warmup_tokens: PositiveInt | None = Field(None, description="length of the warm-up in tokens, instead of steps")
    decay_steps: PositiveInt | None = Field(None, description="last steps, in which wsd decays; by default a tenth")
    min_lr: NonNegativeFloat = Field(0.0, description="learning rate at the end of the run")


class LossScaleConfig(Section):
    """What keeps small gradients from vanishing in fp16; other precisions need none."""

    initial: PositiveFloat = Field(65536, description="what the loss is multiplied by at first; a power of two")
    growth_interval: PositiveInt = Field(2000, description="steps without an overflow after which it doubles")

    @field_validator("initial")
    @classmethod
    def _is_exact(cls, initial: float) -> float:
        if initial < 1 or math.frexp(initial)[0] != 0.5:  # other numbers would round what they scale
            raise ValueError(f"should be a power of two, 1 or more, such as {max(1, 2 ** round(math.log2(initial)))}")
        return initial


class SeqLenPhase(Section):
    """The first steps of a run, on shorter sequences."""

    until_step: PositiveInt = Field(description="the last step of this length")
    seq_len: Size = Field(description="tokens of a sequence, into which each sample is cut")


class TrainConfig(Section):
    """How long, how much at a time, and how."""

    steps: PositiveInt | None = Field(None, description="optimizer steps of the whole run")
    tokens: PositiveInt | None = Field(None, description="length of the run in tokens, instead of steps")
    seq_len: Size = Field(1024, description="sequence length S in tokens")
    seq_len_schedule: list[SeqLenPhase] = Field(
        [], description="shorter sequences for the first steps: `[{until_step: 1000, seq_len: 256}]`, then seq_len"
    )
    micro_batch_size: Size = Field(1, description="sequences a rank takes through the model at once")
    global_batch_size: Size | None = Field(None, description="sequences an optimizer step takes, over all ranks")
    gradient_accumulation_steps: Size | None = Field(None, description="microbatches a step; or the above")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="type of the matrix products")
    parameter_precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="type of the parameters that a step computes with and gathers; those it changes are fp32"
    )
    loss_scale: LossScaleConfig = LossScaleConfig()
    recompute: Literal["none", "selective", "full"] = Field("none", description="activations recomputed in backward")
    recompute_every: Size = Field(1, description="only every n-th block recomputes")
    offload_activations: Literal["none", "host"] = Field(
        "none", description="where what recompute full keeps, a block's input, waits for backward: the host's memory"
    )
    tile: NonNegativeInt = Field(
        0, description="tokens of a sequence that norm and feed-forward take at a time, to hold less; 0 is all"
    )
    z_loss: NonNegativeFloat = Field(0.0, description="weight of (log of the softmax's sum)², PaLM's 1e-4")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over the vocabulary")
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = Field(
        "auto", description="kernel: what torch chooses for the device, a fused one or an error, or plain products"
    )
    fused_norms: bool = Field(
        True, description="RMSNorm keeps its input alone for backward; false is its plain formula"
    )
    compile: bool = Field(False, description="compile each block with torch.compile")
    deterministic: bool = Field(
        False, description="two runs of one layout are equal to the bit, which costs some speed"
    )
    init_from: str | None = Field(None, description="a run or checkpoint whose weights (only) this new run starts from")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    on_bad_step: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="end the run, leave the step out, or go back to the last checkpoint and pass its samples over",
    )
    spike_factor: float | None = Field(
        None,
        gt=1,
        description="a loss or gradient norm of so many times its mean is bad too, not only what is not finite",
    )
    step_timeout: NonNegativeFloat = Field(
        0.0,
        le=_A_YEAR_S,
        description="seconds after which a run that takes no step ends, each rank saying where it is; 0 is never",
    )
    eval_every: NonNegativeInt = Field(0, description="steps between evaluations; 0 is never")
    eval_samples: Size | None = Field(None, description="validation sequences a pass; by default all of them")

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if (self.steps is None) == (self.tokens is None):
            both = self.steps is not None
            raise ValueError(
                "tokens: give train.steps or train.tokens, not both"
                if both
                else "steps is missing: give train.steps or train.tokens"
            )
        if self.parameter_precision == "bf16" != self.precision:
            raise ValueError(
                f"parameter_precision: bf16 parameters are for bf16 products, and train.precision is {self.precision}; "
                "use train.precision bf16, or parameter_precision fp32"
            )
        if self.offload_activations == "host" and self.recompute != "full":
            raise ValueError(
                f"offload_activations: host is for what train.recompute full keeps, and recompute is {self.recompute}; "
                "use train.recompute full, or offload_activations none"
            )
        if self.schedule.warmup_tokens is not None and self.schedule.warmup_steps:
            raise ValueError("schedule.warmup_tokens: give warmup_steps or warmup_tokens, not both")
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(f"schedule.min_lr: {self.schedule.min_lr} is above train.optimizer.lr {self.optimizer.lr}")
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps: {self.schedule.warmup_steps} is more than train.steps {self.steps}"
            )
        ends = [phase.until_step for phase in self.seq_len_schedule]
        if sorted(set(ends)) != ends:
            raise ValueError(f"seq_len_schedule: until_step {ends} should grow from one phase to the next")
        return self

    def seq_len_at(self, step: int) -> int:
        """Tokens of a sequence in a step; the first step is 1."""
        phases = (phase.seq_len for phase in self.seq_len_schedule if step <= phase.until_step)
        return next(phases, self.seq_len)


class ParallelConfig(Section):
    """How the run is laid over the ranks; world = tensor x pipeline x context x data."""

    ranks: Many | None = Field(None, description="processes; by default every device, or one on a CPU")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="what data-parallel ranks share out (arXiv 1910.02054)")
    hybrid: Many | None = Field(
        None, description="data-parallel ranks of a group that shares out; the groups repeat it; by default all"
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="what stays in host memory: the moments, or the parameters too between their uses"
    )
    tensor: Many = Field(1, description="ranks that share each matrix")
    pipeline: Many = Field(1, description="ranks that share the layers, each a run of them or several")
    pipeline_schedule: Annotated[PipelineSchedule, BeforeValidator(_in_lower_case)] = Field(
        "1f1b", description="order in which stages take microbatches forward and backward"
    )
    pipeline_split: Annotated[list[Many] | None, BeforeValidator(_as_list)] = Field(
        None, description="layers of each stage in order; by default balanced by cost, the head's counted"
    )
    pipeline_stages_per_rank: Many | None = Field(
        None, description="stages of a rank; by default 2 for the schedules that need several, else 1"
    )
    context: Many = Field(1, description="ranks that share each sequence")
    context_method: Literal["ring", "ulysses", "hybrid"] = Field(
        "ring", description="how attention crosses sequence shards; hybrid is Ulysses among neighbours, a ring of those"
    )
    context_ulysses: Many | None = Field(
        None, description="neighbours that share heads under hybrid; by default the most that fit the heads and a node"
    )

    @property
    def data(self) -> int:
        """Data-parallel ranks; only meaningful once `ranks` is resolved."""
        assert self.ranks is not None
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def ulysses(self) -> int:
        """Neighbours of a context group that share heads; under hybrid only meaningful once the layout is resolved."""
        return {"ring": 1, "ulysses": self.context}.get(self.context_method, self.context_ulysses or 1)

    @property
    def ring(self) -> int:
        """Ranks of each ring of a context group, of which there is one for each of those neighbours."""
        return self.context // self.ulysses

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks."""
        several = self.pipeline > 1 and self.pipeline_schedule not in ("gpipe", "1f1b")
        return self.pipeline * (self.pipeline_stages_per_rank or (2 if several else 1))

    @property
    def shards(self) -> int:
        """Ranks that share out a parameter's state; data and context ranks hold the same parameters."""
        return 1 if self.zero_stage == 0 else (self.hybrid or self.data) * self.context


class CheckpointConfig(Section):
    """When the run is saved, and how many saves are kept."""

    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0 is at the end only")
    keep_last: PositiveInt = Field(3, description="newest checkpoints kept")
    in_background: bool = Field(
        True, description="train on while one is written, from a copy in the host's memory; else wait for the disk"
    )


class LogConfig(Section):
    """What a run tells."""

    every: PositiveInt = Field(1, description="steps between lines of metrics.jsonl")
    per_source: bool = Field(False, description="loss of each dataset of a blend, too, in training and validation")
    trackers: Annotated[list[Literal["csv", "tensorboard", "wandb"]], BeforeValidator(_as_list)] = Field(
        [], description="services that follow the run, beside metrics.jsonl"
    )
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        "offline", description="whether the tracker wandb sends, keeps in the run's folder, or does nothing"
    )
    samples: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        [], description="prompts; how the model goes on from each is written into samples.jsonl at every checkpoint"
    )
    sample_tokens: PositiveInt = Field(64, description="most tokens of a sample")
    layer_statistics: NonNegativeInt = Field(
        0, description="steps between looks at each layer's gradient norm and activations; 0 is never"
    )
    profile: NonNegativeInt = Field(0, description="steps to profile after the first three; `--profile N` for short")


class RunConfig(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+=-]*$")] | None = Field(
        None, description="run folder runs/<name>; by default a name that says model, layout and batch"
    )
    seed: NonNegativeInt = Field(1234, description="of weights, data order and dropout")
    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str | None) -> str | None:
        if name == "latest":
            raise ValueError("runs/latest points to the newest run; choose another name")
        return name
