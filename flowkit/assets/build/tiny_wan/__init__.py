"""tiny-wan, small things that move: four stages, a file each."""

from __future__ import annotations

from pathlib import Path


def build(out: Path, work: Path, last: int, flow_steps: int) -> None:
    """Run the stages up to number `last` (text, vae, flow, guidance: none here, write)."""
    from flowkit.assets.build.tiny_wan.autoencoder import train_vae
    from flowkit.assets.build.tiny_wan.bundle import write_bundle
    from flowkit.assets.build.tiny_wan.decoder import sharpen
    from flowkit.assets.build.tiny_wan.flow import train_flow
    from flowkit.assets.build.tiny_wan.text import train_text

    encoder, tokenizer = train_text(work)
    if last < 1:
        return
    vae = sharpen(train_vae(work), work)
    if last < 2:
        return
    net = train_flow(work, encoder, tokenizer, vae, flow_steps)
    if last > 3:
        write_bundle(out, encoder, tokenizer, vae, net)
