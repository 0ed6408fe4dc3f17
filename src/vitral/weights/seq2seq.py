"""Hugging Face's encoder-decoders (BART, Marian, and ViT with TrOCR) in our names.

Names become ours by a table of patterns, applied in order. The config is the caller's to give.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vitral.config import Seq2SeqConfig
from vitral.weights.layout import Pattern, translate

VIT: list[Pattern] = [
    (r"^encoder\.embeddings\.cls_token", "encoder.cls_token"),
    (r"^encoder\.embeddings\.position_embeddings", "encoder.pos_embed"),
    (r"^encoder\.embeddings\.patch_embeddings\.projection\.", "encoder.patch_embed.proj."),
    (r"^encoder\.layernorm\.", "encoder.norm."),
    (r"^encoder\.layers\.(\d+)\.layernorm_before\.", r"encoder.blocks.\1.norm1."),
    (r"^encoder\.layers\.(\d+)\.layernorm_after\.", r"encoder.blocks.\1.norm2."),
    (r"^encoder\.layers\.(\d+)\.attention\.([qkv])_proj\.", r"encoder.blocks.\1.attn.\2."),
    (r"^encoder\.layers\.(\d+)\.attention\.o_proj\.", r"encoder.blocks.\1.attn.proj."),
    (r"^encoder\.layers\.(\d+)\.mlp\.", r"encoder.blocks.\1.mlp."),
]
TEXT: list[Pattern] = [
    (r"^decoder\.model\.", ""),
    (r"^model\.", ""),
    (r"\.embed_tokens\.", ".token_embed.tokens."),
    (r"\.embed_positions\.weight", ".token_embed.pos_embed"),
    (r"\.layernorm_embedding\.", ".token_embed.norm."),
    (r"\.layers\.(\d+)\.", r".blocks.\1."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn_layer_norm\.", ".norm2."),
    (r"^(encoder.*)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(decoder.*)\.final_layer_norm\.", r"\1.norm3."),
    (r"^(encoder|decoder)\.layer_norm\.", r"\1.norm."),
    (r"\.out_proj\.", ".proj."),
    (r"attn\.([qkv])_proj\.", r"attn.\1."),
    (r"(?<!mlp)\.fc([12])\.", r".mlp.fc\1."),
    (r"^final_logits_bias", "decoder.output.bias"),
    (r"^(lm_head|decoder\.output_projection)\.", "decoder.output."),
    (r"^enc_to_dec_proj\.", "memory_proj."),
]


def from_hugging_face(tensors: Mapping[str, Tensor], config: Seq2SeqConfig) -> dict[str, Tensor]:
    """Their state dict in our names, for a `Seq2Seq` of this config.

    An encoder of ours has one matrix for q, k and v; their tables of positions may have rows at the front that no
    position uses (BART's two); and what is tied is stored once.
    """
    ours = {translate(name, [*VIT, *TEXT]): tensor for name, tensor in tensors.items()}
    for name in [name for name in ours if re.match(r"encoder\..*\.attn\.q\.", name)]:
        parts = [ours.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
        ours[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    for part, options in (("encoder", config.encoder), ("decoder", config.decoder)):
        if options is not None:
            table = f"{part}.token_embed.pos_embed"
            ours[table] = ours[table][-options.max_length :]
    unused = ["shared.weight", "decoder.output.weight"] if config.decoder.tied_output else ["shared.weight"]
    unused += [] if config.decoder.output_bias else ["decoder.output.bias"]
    for name in unused:
        ours.pop(name, None)
    if "decoder.output.bias" in ours:
        ours["decoder.output.bias"] = ours["decoder.output.bias"].flatten()
    return ours
