"""The training loop, read from top to bottom. It knows nothing of ViTs, of images on disk, or of what the task is."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from vitral.config import LoopConfig
from vitral.data.augment import neighbours
from vitral.data.inputs import Batch
from vitral.data.loader import TrainLoader
from vitral.data.noise import Noise
from vitral.errors import CheckpointError, ConfigError, TrainingError
from vitral.schema import Count, Finite, conform
from vitral.tasks.objective import Objective, place_noise
from vitral.training import norms
from vitral.training.checkpoint import Checkpoint, load_optimizer_tensors, optimizer_tensors
from vitral.training.distributed import Processes
from vitral.training.ema import EMA
from vitral.training.optim import make_optimizers
from vitral.training.precision import autocast, full_precision
from vitral.training.schedule import cosine_with_warmup


@dataclass
class Hooks:
    """What the loop calls on the way: everything that talks, writes or looks at the clock outside."""

    log: Callable[[dict[str, Any]], None]
    """A line of metrics."""
    validate: Callable[[int], dict[str, float]] | None
    """Metrics of the weights as they are after so many epochs, on the validation part."""
    save: Callable[[Checkpoint], None]
    """Write a checkpoint."""
    keep_best: Callable[[], None]
    """Keep the weights as they are as the best so far."""
    warn: Callable[[str], None]
    stop: Callable[[], bool]
    """Whether somebody wants the run to end now."""


@dataclass
class State:
    """Where a run stands; everything else is a function of this, the config and the weights."""

    step: Count = 0
    seconds: Finite = 0.0
    bad_steps: Count = 0
    skipped: Count = 0
    unreadable: Count = 0
    best: float = float("-inf")
    stale: Count = 0
    """Evaluations on the validation part since the best."""
    progress: Finite = 0.0
    """Of the last step, which schedules that are read between steps follow."""
    finished: bool = False


@dataclass(kw_only=True)
class Saved(State):
    """The plain values of a checkpoint."""

    ema_steps: Count
    options: dict[str, Any] | None = None
    """Of the run; not in checkpoints of earlier versions."""


def fit(
    model: nn.Module,
    objective: Objective,
    loader: TrainLoader,
    config: LoopConfig,
    hooks: Hooks,
    processes: Processes,
    device: torch.device,
    dtype: torch.dtype | None,
    resume: Checkpoint | None = None,
    seconds: float | None = None,
) -> State:
    """Train until the epochs, the steps or the seconds are over; the averaged weights are then in the model.

    The seconds are `config.max_minutes` unless they are given.
    """
    if seconds is None and config.max_minutes is not None:
        seconds = 60 * config.max_minutes
    if config.checkpoint_blocks:
        recompute_blocks(model)
    optimizers, ema, meter, state = make_optimizers(model, config), EMA(model, config.ema), Meter(processes), State()
    if resume is not None:
        state = restore(resume, model, optimizers, ema, meter)
        objective.before_step(state.progress, max(state.step - 1, 0) / loader.steps_per_epoch, optimizers)
    net = processes.wrap(model)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16 and device.type == "cuda")
    trained = [p for p in model.parameters() if p.requires_grad]
    total = total_steps(config, loader)
    warmup = min(config.warmup_epochs / config.epochs, 0.5)
    began = time.monotonic() - state.seconds
    last_save = time.monotonic()
    norms.train(model)

    def save() -> None:
        hooks.save(snapshot(state, model, optimizers, ema, meter, config))

    def measure() -> norms.Statistics:
        return norms.measure(model, passes(model, objective, loader, config, device, dtype), processes.mean)

    for batch in loader.batches(state.step):
        state.seconds = time.monotonic() - began
        progress = processes.share(along(state, total, seconds))
        if progress >= 1:
            break
        state.progress, state.finished = progress, False  # a finished run may have been given a larger budget
        rate = cosine_with_warmup(max(progress, 0.5 / total), warmup, config.min_lr)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak_lr"] * rate
        objective.before_step(progress, state.step / loader.steps_per_epoch, optimizers)

        loss = 0.0
        for part in split(batch, config.accumulate):
            noise = Noise(config.seed, part.samples)
            place_noise(model, noise, device)
            mixed = loader.inputs.augment(part.inputs.to(device), noise, config.augment, mirror=not objective.spatial)
            targets = loader.targets.warp(part.targets.to(device), mixed.maps)
            with autocast(device, dtype):
                outputs = full_precision(objective.forward(net, mixed.inputs, targets, noise))
                part_loss = objective.loss(outputs, targets, targets[neighbours(len(targets)).to(device)], mixed.own)
            scaler.scale(part_loss / config.accumulate).backward()
            loss += part_loss.item() / config.accumulate
            with torch.no_grad():
                meter.add(objective.sums(outputs, targets))

        if processes.any(loss != loss or abs(loss) == float("inf")):
            skip(state, loss, batch, config, hooks)
        else:
            state.bad_steps = 0
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            objective.before_update(state.step / loader.steps_per_epoch)
            norm = nn.utils.clip_grad_norm_(trained, config.clip_grad or float("inf"))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            ema.update()
            objective.after_update()
            meter.add_loss(loss, norm)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        state.step += 1
        report_unreadable(state, batch, hooks)

        epoch, rest = divmod(state.step, loader.steps_per_epoch)
        if state.step % config.log_steps == 0 or rest == 0 or state.step == 1:
            line = {"step": state.step, "epoch": state.step / loader.steps_per_epoch, "progress": progress, "lr": rate}
            hooks.log({"split": "train", **line, **meter.read(), "seconds": state.seconds})
        if rest == 0 and hooks.validate is not None and (epoch % config.eval_every == 0 or state.step == total):
            evaluate_average(model, ema, measure, objective.better, hooks, state, epoch)
            if config.patience is not None and state.stale >= config.patience:
                hooks.warn(f"stopped early after epoch {epoch}: no improvement in {state.stale} evaluations")
                break
        if processes.any(due(config, state, last_save)):
            last_save = time.monotonic()
            save()
        if processes.any(hooks.stop()):
            save()
            raise KeyboardInterrupt(f"stopped after step {state.step} of {total}, which is saved; --resume continues")

    state.finished = True
    save()
    if config.ema:
        ema.swap()
    measure()
    model.eval()
    return state


def passes(
    model: nn.Module,
    objective: Objective,
    loader: TrainLoader,
    config: LoopConfig,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Iterator[None]:
    """Put the first batches of training through the model, one with each step: what batch norms are measured by."""
    for batch in loader.first(norms.BATCHES):
        noise = Noise(config.seed, batch.samples)
        mixed = loader.inputs.augment(batch.inputs.to(device), noise, config.augment, mirror=not objective.spatial)
        targets = loader.targets.warp(batch.targets.to(device), mixed.maps)
        with autocast(device, dtype):
            objective.forward(model, mixed.inputs, targets, noise)
        yield


def total_steps(config: LoopConfig, loader: TrainLoader) -> int:
    """Steps of the whole run, unless the clock ends it before."""
    return config.max_steps or config.epochs * loader.steps_per_epoch


def along(state: State, total: int, seconds: float | None) -> float:
    """How far the run is, 0 to 1: by steps, or by the clock where that is further."""
    by_steps = state.step / total
    return by_steps if seconds is None else max(by_steps, state.seconds / seconds)


def split(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cut a batch for accumulation, in even pieces so that neighbours stay together."""
    size = -(-len(batch.targets) // parts)
    size += size % 2 if parts > 1 else 0
    for i in range(0, len(batch.targets), size):
        at = slice(i, i + size)
        yield Batch(batch.inputs[at], batch.targets[at], batch.samples[at], [])


def recompute_blocks(model: nn.Module) -> None:
    """Keep only the input of each block for the backward pass, and compute the block again there."""
    if norms.learning(model):
        raise ConfigError(
            "--checkpoint-blocks computes each block twice, and the batch norms of this model would count every batch "
            "twice; leave it out, or take a smaller --batch-size with --accumulate."
        )
    blocks = [block for name, block in model.named_modules() if name.rpartition(".")[0].endswith("blocks")]
    if not blocks:
        raise ConfigError(
            "--checkpoint-blocks does not apply: this model has no blocks to compute again; leave it out."
        )
    for block in blocks:
        forward = block.forward
        block.forward = partial(recompute, forward, use_reentrant=False)


def skip(state: State, loss: float, batch: Batch, config: LoopConfig, hooks: Hooks) -> None:
    """Leave out a step whose loss is not finite, and give up after too many in a row."""
    state.bad_steps += 1
    state.skipped += 1
    samples = f"samples {int(batch.samples[0])} to {int(batch.samples[-1])}"
    hooks.warn(f"step {state.step + 1}: the loss is {loss}; the step is skipped ({samples})")
    if state.bad_steps >= config.max_bad_steps:
        raise TrainingError(
            f"the loss was not finite in {state.bad_steps} steps in a row, last {loss} at step {state.step + 1}; "
            f"lower --lr or --muon-lr, or set --clip-grad. The last good checkpoint is kept."
        )


def report_unreadable(state: State, batch: Batch, hooks: Hooks) -> None:
    """Say which images could not be read, the first few times."""
    for problem in batch.unreadable:
        state.unreadable += 1
        if state.unreadable <= 5:
            hooks.warn(problem)


def evaluate_average(
    model: nn.Module,
    ema: EMA,
    measure: Callable[[], norms.Statistics],
    better: str,
    hooks: Hooks,
    state: State,
    epoch: int,
) -> None:
    """Evaluate the averaged weights on the validation part, and keep them if they are the best so far."""
    assert hooks.validate is not None
    ema.swap()
    statistics = measure()
    model.eval()
    metrics = hooks.validate(epoch)
    state.stale += 1
    if metrics[better] > state.best:
        state.best, state.stale = metrics[better], 0
        hooks.keep_best()
    ema.swap()
    norms.restore(model, statistics)
    norms.train(model)
    hooks.log({"split": "val", "step": state.step, "epoch": epoch, **metrics, "seconds": state.seconds})


def due(config: LoopConfig, state: State, last_save: float) -> bool:
    """Whether it is time for a checkpoint."""
    if config.save_steps is not None:
        return state.step % config.save_steps == 0
    return time.monotonic() - last_save > 60 * config.save_minutes


class Meter:
    """Training metrics since they were last read."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, float] = {}
        self.norm, self.steps, self.began = 0.0, 0, time.monotonic()

    def add(self, sums: dict[str, float]) -> None:
        """Take the sums of a batch in."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def add_loss(self, loss: float, norm: Tensor) -> None:
        """Take the loss that was minimised, and the norm of its gradient, in."""
        self.add({"objective": loss / self.processes.world})
        self.norm, self.steps = self.norm + norm.item(), self.steps + 1

    def read(self) -> dict[str, float]:
        """Return the means over all processes since the last call."""
        sums = self.processes.sum(self.sums)
        count = max(sums.pop("count"), 1.0)
        objective = sums.pop("objective", 0.0) / max(self.steps, 1)
        sums.pop("loss", None)
        speed = count / max(time.monotonic() - self.began, 1e-9)
        norm = self.norm / max(self.steps, 1)
        self._clear()
        means = {name: value / count for name, value in sums.items()}
        return {"loss": objective, **means, "grad_norm": norm, "images_per_second": speed}

    def state_dict(self) -> dict[str, Tensor]:
        """Return what was added since the last reading, an entry for each process."""
        own = {"norm": self.norm, "steps": self.steps, "elapsed": time.monotonic() - self.began}
        own |= {f"sums.{name}": value for name, value in self.sums.items()}
        rows = self.processes.gather(torch.tensor([list(own.values())], dtype=torch.float64))
        return dict(zip(own, rows.T, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue with what was added before, perhaps by another number of processes."""
        rank, world = self.processes.rank, self.processes.world
        sums = {name.removeprefix("sums."): value for name, value in state.items() if name.startswith("sums.")}
        self.sums = {name: value[rank::world].sum().item() for name, value in sums.items()}
        self.norm, self.steps = state["norm"][0].item(), int(state["steps"][0])
        self.began = time.monotonic() - state["elapsed"][0].item()


def snapshot(
    state: State,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    ema: EMA,
    meter: Meter,
    config: LoopConfig,
) -> Checkpoint:
    """Return everything that a run needs to continue as if nothing had happened, and the options it was run with."""
    values = vars(state) | {"ema_steps": ema.steps, "options": config.to_dict()}
    tensors = {
        "model": dict(model.state_dict()),
        "ema": ema.state_dict(),
        "optimizer": optimizer_tensors(optimizers),
        "random": {"torch": torch.get_rng_state()},
        "meter": meter.state_dict(),
    }
    return Checkpoint(state.step, tensors, values)


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizers: list[torch.optim.Optimizer], ema: EMA, meter: Meter
) -> State:
    """Put everything back as it was; raises a `CheckpointError` if the checkpoint is of another model."""
    try:
        if "meter" in checkpoint.tensors:  # not in those of earlier versions
            meter.load_state_dict(checkpoint.tensors["meter"])
        ema.load_state_dict(checkpoint.tensors["ema"], checkpoint.values["ema_steps"])
        model.load_state_dict(checkpoint.tensors["model"])
        load_optimizer_tensors(optimizers, checkpoint.tensors["optimizer"])
        torch.set_rng_state(checkpoint.tensors["random"]["torch"])
        return conform({**checkpoint.values, "step": checkpoint.step}, State, "values")
    except (KeyError, IndexError, ValueError, RuntimeError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} does not fit this run ({reason.rstrip('.:')}); remove it to resume from "
            f"the one before."
        ) from error
