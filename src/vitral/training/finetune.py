"""What of a model learns: all of it, all but frozen parts, or the head and a low-rank change of the backbone.

Knows the model by its parts' names and by its `backbone`, the one inside a model that brings its own head.
"""

from torch import nn

from vitral.config import TrainConfig
from vitral.errors import ConfigError, unknown_name
from vitral.models.backbone import backbone_of
from vitral.models.cnn import ResNet
from vitral.models.lora import add_lora, count_trainable, lora_parameters
from vitral.models.zoo import is_model
from vitral.training.optim import layers_of
from vitral.weights.fetch import is_source


def choose_trained(model: nn.Module, config: TrainConfig) -> None:
    """Freeze what the options name, or put LoRA on the backbone, whose own weights then rest."""
    freeze(model, config.freeze)
    freeze_layers(model, config.freeze_layers)
    if config.lora.rank:
        require_weights(config.model, f"LoRA (--lora.rank {config.lora.rank})")
        backbone, o = backbone_of(model), config.lora
        if isinstance(backbone, ResNet):
            raise ConfigError("LoRA changes the matrices of a Transformer, and a ResNet has none; use --freeze-layers.")
        add_lora(backbone, o.rank, o.alpha, o.parts, trained="head" if backbone is model else "")
    if not count_trainable(model):
        raise ConfigError(
            f"--freeze {config.freeze} leaves nothing to train; leave the head out of it: --freeze backbone."
        )


def require_weights(model: str, what: str) -> None:
    """Raise unless `model` names weights, where `what` makes no sense without them."""
    if not is_source(model):
        wrong = "is a model with fresh weights" if is_model(model) else "is not there"
        raise ConfigError(
            f"{what} needs weights to start from, and --model {model} {wrong}; give a run, a file, NAME.TAG of vitral "
            f"models --pretrained, or hf-hub:owner/name."
        )


def freeze(model: nn.Module, parts: str) -> None:
    """Stop the training of parts, words separated by commas: each one or more whole pieces that begin names.

    `backbone` is everything but the head, whatever the model is.
    """
    named = dict(model.named_parameters())
    backbone = backbone_of(model)
    own = getattr(model, "head", None) if backbone is model else None  # a decoder alone has none
    head = {id(p) for p in own.parameters()} if isinstance(own, nn.Module) else set()
    body = [p for p in backbone.parameters() if id(p) not in head]
    for word in filter(None, (word.strip() for word in parts.split(","))):
        chosen = body if word == "backbone" else [p for name, p in named.items() if f"{name}.".startswith(f"{word}.")]
        if not chosen:
            raise unknown_name(
                "part to freeze", word, {name.rsplit(".", 1)[0] for name in named} | {"backbone", *named}
            )
        for parameter in chosen:
            parameter.requires_grad_(False)


def freeze_layers(model: nn.Module, count: int) -> None:
    """Stop the training of the backbone's first blocks, and of the patches, tokens and positions before them."""
    backbone = backbone_of(model)
    layers, depth = layers_of(backbone)
    if count > depth:
        raise ConfigError(f"--freeze-layers must be at most the number of blocks or stages, {depth}, got {count}.")
    for name, parameter in backbone.named_parameters():
        if count and layers[name] <= count:
            parameter.requires_grad_(False)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters of the plain model, LoRA folded in, and how many numbers training changes, LoRA's own included."""
    own = sum(p.numel() for p in lora_parameters(model).values())
    return sum(p.numel() for p in model.parameters()) - own, count_trainable(model)
