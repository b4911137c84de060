"""tiny-flux, words in pictures: five stages, a file each."""

from __future__ import annotations

from pathlib import Path


def build(out: Path, work: Path, last: int, flow_steps: int, guidance_steps: int) -> None:
    """Run the stages up to number `last` (text, vae, flow, guidance, write)."""
    from flowkit.assets.build.tiny_flux.autoencoder import train_vae
    from flowkit.assets.build.tiny_flux.bundle import write_bundle
    from flowkit.assets.build.tiny_flux.flow import train_flow
    from flowkit.assets.build.tiny_flux.guidance import train_guidance
    from flowkit.assets.build.tiny_flux.text import train_text

    encoder = train_text(work)
    if last < 1:
        return
    vae = train_vae(work)
    if last < 2:
        return
    net = train_flow(work, encoder, vae, flow_steps)
    if last < 3:
        return
    net = train_guidance(work, encoder, vae, net, guidance_steps)
    if last > 3:
        write_bundle(out, encoder, vae, net)
