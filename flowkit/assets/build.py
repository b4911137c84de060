"""Train the embedded bundles from nothing: `python -m flowkit.assets.build tiny-flux --out DIR`.

Four stages, each seeded, each keeping its result in DIR/.build so that an interrupted build goes on:
text encoders (byte-level T5 and a tiny CLIP, taught to spell the prompt), the autoencoder, the flow
transformer, and guidance distillation, which teaches the transformer's guidance embedding to answer
with v_u + g (v_c - v_u) in one call, as FLUX.1-dev does.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowkit.assets.words import (
    FONTS,
    GROUNDS,
    HEIGHT,
    INKS,
    LETTERS,
    WIDTH,
    draw_prompt,
    draw_sign,
    render,
)

TEXT_LENGTH = 42
WIDTH_TEXT = 64
MAX_LETTERS = 5


def log(text: str) -> None:
    """One line of progress."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


# --- the networks ---------------------------------------------------------------------------------


def make_t5() -> Any:
    """A byte-level T5 encoder, two layers of 64 channels."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=WIDTH_TEXT,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )


def make_clip() -> Any:
    """A tiny CLIP text encoder over single characters, two layers of 64 channels."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=98,
            hidden_size=WIDTH_TEXT,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=TEXT_LENGTH + 2,
            bos_token_id=96,
            eos_token_id=97,
            pad_token_id=97,
            projection_dim=WIDTH_TEXT,
        )
    )


def make_vae() -> Any:
    """AutoencoderKL, f8, 16 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 48, 64),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=96,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def make_transformer() -> Any:
    """FluxTransformer2DModel of about 2.4 M parameters, with the guidance embedding."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH_TEXT,
        pooled_projection_dim=WIDTH_TEXT,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def make_tokenizers(folder: Path) -> tuple[Any, Any]:
    """ByT5 for the T5 encoder; a CLIP tokenizer whose vocabulary is the printable characters."""
    from transformers import ByT5Tokenizer, CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    # CLIP lower-cases, so capitals would be lost: its part is the attributes, T5's is the spelling.
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    pieces = [*characters, *(c + "</w>" for c in characters)]
    keep = [p for p in pieces if p[0].isalnum() or p[0] in '",.-']
    vocabulary = {p: i for i, p in enumerate(keep[:96])}
    vocabulary |= {"<|startoftext|>": 96, "<|endoftext|>": 97}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    clip = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=TEXT_LENGTH + 2
    )
    return clip, ByT5Tokenizer(model_max_length=TEXT_LENGTH)


# --- stage 1: text --------------------------------------------------------------------------------


def text_batch(
    rng: np.random.Generator, size: int
) -> tuple[list[str], list[Any], list[tuple[int, int, int]]]:
    """Prompts, their signs, and what each prompt says of ink, ground and font (0 = open)."""
    prompts, signs, said = [], [], []
    for _ in range(size):
        sign = draw_sign(rng)
        prompt = draw_prompt(rng, sign)
        tail = prompt.rsplit('"', 1)[1]
        said.append(
            (
                (1 + list(INKS).index(sign.ink)) if " in " in tail else 0,
                (1 + list(GROUNDS).index(sign.ground)) if " on " in tail else 0,
                (1 + list(FONTS).index(sign.font)) if ", " in tail else 0,
            )
        )
        prompts.append(prompt)
        signs.append(sign)
    return prompts, signs, said


class Encoder(nn.Module):
    """The two text encoders and their tokenizers, called as FluxPipeline calls them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clip_tokenizer, self.t5_tokenizer = make_tokenizers(folder)
        self.t5, self.clip = make_t5(), make_clip()

    def forward(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Sequence [B, 42, 64] and pooled [B, 64]."""
        t5 = self.t5_tokenizer(
            prompts, padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="pt"
        )
        clip = self.clip_tokenizer(
            prompts, padding="max_length", max_length=TEXT_LENGTH + 2, truncation=True, return_tensors="pt"
        )
        return self.t5(t5.input_ids)[0], self.clip(clip.input_ids).pooler_output


def train_text(folder: Path, steps: int = 1200) -> Encoder:
    """Teach T5 which letter stands where, and CLIP what is said of ink, ground and font."""
    encoder = Encoder(folder / "clip")
    saved = folder / "text.pt"
    if saved.exists():
        encoder.load_state_dict(torch.load(saved, weights_only=True))
        return encoder.eval().requires_grad_(False)
    heads = nn.ModuleDict(
        {
            "letter": nn.Linear(WIDTH_TEXT, 27),
            "place": nn.Linear(WIDTH_TEXT, MAX_LETTERS + 1),
            "said": nn.Linear(WIDTH_TEXT, 7 + 6 + 3),
            "seen": nn.Linear(WIDTH_TEXT, 7 + 6 + 3),
        }
    )
    params = [*encoder.parameters(), *heads.parameters()]
    opt = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=steps, pct_start=0.1)
    rng = np.random.default_rng(1)
    for step in range(steps):
        prompts, signs, said = text_batch(rng, 64)
        sequence, pooled = encoder(prompts)
        letter = torch.full((64, TEXT_LENGTH), 26)
        place = torch.full((64, TEXT_LENGTH), MAX_LETTERS)
        for b, sign in enumerate(signs):
            for i, c in enumerate(sign.word):
                letter[b, 10 + i], place[b, 10 + i] = LETTERS.index(c), i
        want = torch.tensor(said)
        losses = [
            F.cross_entropy(heads["letter"](sequence).flatten(0, 1), letter.flatten()),
            F.cross_entropy(heads["place"](sequence).flatten(0, 1), place.flatten()),
        ]
        # the attributes must be readable at every letter as well, so that one look at a letter is enough
        near = heads["seen"](sequence[:, 10:12])
        for logits, target in ((heads["said"](pooled), want), (near, want[:, None].expand(-1, 2, -1))):
            for part, index in zip(logits.split([7, 6, 3], -1), range(3), strict=True):
                losses.append(F.cross_entropy(part.flatten(0, -2), target[..., index].flatten()))
        loss = torch.stack(losses).sum()
        opt.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            log(f"text {step} loss {loss.item():.4f} parts {[round(x.item(), 4) for x in losses]}")
    torch.save(encoder.state_dict(), saved)
    return encoder.eval().requires_grad_(False)


# --- stage 2: autoencoder -------------------------------------------------------------------------


def pictures(seed: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of rendered signs, [B, 3, 32, 96] in [-1, 1]."""
    rng = np.random.default_rng(seed)
    while True:
        signs = [replace(draw_sign(rng), cell=0) for _ in range(batch)]  # convolutions know no cells
        yield to_tensor(np.stack([render(s) for s in signs]))


def to_tensor(pixels: np.ndarray) -> Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(folder: Path, steps: int = 2600, kl: float = 5e-4, batch: int = 32) -> Any:
    """L1 plus a KL that is strong for an autoencoder: smooth latents are what makes the flow learnable."""
    vae = make_vae()
    saved = folder / "vae.pt"
    if saved.exists():
        vae.load_state_dict(torch.load(saved, weights_only=True))
        return set_scale(vae.eval().requires_grad_(False))
    opt = torch.optim.AdamW(vae.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    start = time.time()
    for step, x in zip(range(steps), pictures(2, batch), strict=False):
        for group in opt.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        with torch.autocast("cpu", torch.bfloat16):
            mean, logvar = vae.encoder(x).chunk(2, 1)
            logvar = logvar.clamp(-20, 10)
            y = vae.decoder(mean + (0.5 * logvar).exp() * torch.randn_like(mean))
        distance = (y - x).abs().mean() + 0.5 * (y - x).square().mean()
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).float().mean()
        torch.autograd.backward(distance + kl * min(1.0, step / 800) ** 2 * divergence)
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            pace = (time.time() - start) / (step + 1)
            log(f"vae {step} distance {distance.item():.4f} kl {divergence.item():.3f} {pace:.3f} s/step")
            torch.save(vae.state_dict(), folder / "vae.part.pt")
    torch.save(vae.state_dict(), saved)
    return set_scale(vae.eval().requires_grad_(False))


def set_scale(vae: Any) -> Any:
    """Scale and shift that give the latents of the data mean 0 and standard deviation 1."""
    with torch.no_grad():
        z = torch.cat(
            [vae.encode(x).latent_dist.mean for x, _ in zip(pictures(3, 64), range(4), strict=False)]
        )
    vae.register_to_config(
        scaling_factor=round(1 / z.std().item(), 4), shift_factor=round(z.mean().item(), 4)
    )
    return vae


# --- stage 3 and 4: the flow ----------------------------------------------------------------------


def pack(z: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H W / 4, 4 C], FLUX's order."""
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def image_ids(h: int, w: int) -> Tensor:
    """FLUX's position ids of the packed tokens, [H W / 4, 3]."""
    ids = torch.zeros(h // 2, w // 2, 3)
    ids[..., 1] += torch.arange(h // 2)[:, None]
    ids[..., 2] += torch.arange(w // 2)[None, :]
    return ids.reshape(-1, 3)


def data_set(vae: Any, size: int, seed: int) -> tuple[Tensor, list[str]]:
    """Packed latents [N, 12, 64] (a sample of the posterior each) and their prompts, made once."""
    rng = np.random.default_rng(seed)
    latents, prompts = [], []
    for start in range(0, size, 256):
        signs = [draw_sign(rng) for _ in range(min(256, size - start))]
        prompts += [draw_prompt(rng, s) for s in signs]
        with torch.no_grad():
            z = vae.encode(to_tensor(np.stack([render(s) for s in signs]))).latent_dist.mean
        latents.append(pack((z - vae.config.shift_factor) * vae.config.scaling_factor))
    return torch.cat(latents), prompts


def call(net: Any, x: Tensor, t: Tensor, cond: tuple[Tensor, Tensor], guidance: Tensor) -> Tensor:
    """Velocity of packed latents at time t in [0, 1]."""
    out: Tensor = net(
        hidden_states=x,
        timestep=t,
        encoder_hidden_states=cond[0],
        pooled_projections=cond[1],
        guidance=guidance,
        img_ids=image_ids(4, 12),
        txt_ids=torch.zeros(TEXT_LENGTH, 3),
        return_dict=False,
    )[0]
    return out


@torch.no_grad()
def draw(
    net: Any, vae: Any, encoder: Encoder, prompts: list[str], steps: int, guidance: float, seed: int = 0
) -> np.ndarray:
    """Euler samples on FLUX's schedule, uint8 [B, 32, 96, 3]."""
    mu = 0.5 + (12 - 256) * (1.15 - 0.5) / (4096 - 256)
    grid = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    grid = torch.cat([math.exp(mu) / (math.exp(mu) + 1 / grid - 1), torch.zeros(1)]).float()
    cond = encoder(prompts)
    x = torch.randn(len(prompts), 12, 64, generator=torch.Generator().manual_seed(seed))
    for t, s in pairwise(grid):
        x = x + (s - t) * call(net, x, t.expand(len(x)), cond, torch.full((len(x),), guidance))
    b, h, w, c = len(x), 2, 6, 16
    z = x.view(b, h, w, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, 2 * h, 2 * w)
    y = vae.decode(z / vae.config.scaling_factor + vae.config.shift_factor).sample
    made: np.ndarray = ((y.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return made


def read(pixels: np.ndarray) -> list[str]:
    """What OCR reads in each picture, upper case without spaces."""
    from rapidocr import RapidOCR
    from rapidocr.ch_ppocr_rec import TextRecInput

    engine = RapidOCR(params={"Global.log_level": "error", "Rec.rec_img_shape": [3, 48, 144]})
    found = engine._load_rec_model()(TextRecInput(img=[np.ascontiguousarray(p[..., ::-1]) for p in pixels]))
    return [t.replace(" ", "").upper() for t in found.txts]


def exact(pixels: np.ndarray, prompts: list[str]) -> float:
    """Share of the pictures in which OCR reads the quoted word exactly."""
    return float(np.mean([r == p.split('"')[1] for r, p in zip(read(pixels), prompts, strict=True)]))


def held_out(size: int, seed: int = 77) -> list[str]:
    """Prompts for progress reports."""
    rng = np.random.default_rng(seed)
    return [draw_prompt(rng, draw_sign(rng)) for _ in range(size)]


def train_flow(
    folder: Path,
    encoder: Encoder,
    vae: Any,
    steps: int,
    batch: int = 64,
    lr: float = 1.5e-3,
    report: int = 500,
) -> Any:
    """Rectified flow with 10 % of the prompts dropped; the guidance input says 1 throughout."""
    net = make_transformer()
    saved = folder / "flow.pt"
    if saved.exists():
        net.load_state_dict(torch.load(saved, weights_only=True))
        return net.eval().requires_grad_(False)
    latents, prompts = cached(folder / "data.pt", lambda: data_set(vae, 60_000, seed=4))
    opt = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    shadow = {n: p.detach().clone() for n, p in net.named_parameters()}

    def loss_of(x0: Tensor, eps: Tensor, t: Tensor, c: Tensor, p: Tensor) -> Tensor:
        x = (1 - t[:, None, None]) * x0 + t[:, None, None] * eps
        v = call(net, x, t, (c, p), torch.ones_like(t))
        return (v - (eps - x0)).square().mean()

    step_loss = torch.compile(loss_of)
    rng = torch.Generator().manual_seed(5)
    first, start, total = 0, time.time(), 0.0
    part = folder / "flow.part.pt"
    if part.exists():
        state = torch.load(part, weights_only=True)
        net.load_state_dict(state["net"])
        shadow, first = state["shadow"], state["step"]
        opt.load_state_dict(state["opt"])
        rng.set_state(state["rng"])
    for step in range(first, steps):
        pick = torch.randint(len(latents), (batch,), generator=rng).tolist()
        drop = torch.rand(batch, generator=rng) < 0.1
        with torch.no_grad():
            c, p = encoder(["" if d else prompts[i] for i, d in zip(pick, drop, strict=True)])
        x0 = latents[pick]
        t = torch.sigmoid(torch.randn(batch, generator=rng) + 0.4)
        loss = step_loss(x0, torch.randn(x0.shape, generator=rng), t, c, p)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 200) * min(1.0, max(0.02, (steps - step) / (0.5 * steps)))
        for group in opt.param_groups:
            group["lr"] = lr * rate
        opt.step()
        opt.zero_grad()
        decay = min(0.999, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(shadow.values()), [q.detach() for q in net.parameters()], 1 - decay)
        total += loss.item()
        if (step + 1) % 100 == 0:
            pace = (time.time() - start) / (step + 1 - first)
            log(f"flow {step + 1} loss {total / 100:.4f} {pace:.3f} s/step")
            total = 0.0
        if (step + 1) % report == 0:
            torch.save(
                {
                    "net": net.state_dict(),
                    "shadow": shadow,
                    "step": step + 1,
                    "opt": opt.state_dict(),
                    "rng": rng.get_state(),
                },
                part,
            )
            probe = make_transformer()
            probe.load_state_dict(shadow)
            asked = held_out(64)
            scores = {n: exact(draw(probe, vae, encoder, asked, n, 1.0), asked) for n in (1, 6, 28)}
            log(f"flow {step + 1} exact OCR of 64 without guidance, by steps: {scores}")
    torch.save(shadow, saved)
    net.load_state_dict(shadow)
    return net.eval().requires_grad_(False)


def cached(file: Path, make: Callable[[], Any]) -> Any:
    """The saved value, or a new one, saved."""
    if not file.exists():
        torch.save(make(), file)
    return torch.load(file, weights_only=True)


def train_guidance(
    folder: Path, encoder: Encoder, vae: Any, teacher: Any, steps: int, batch: int = 64
) -> Any:
    """Guidance distillation: the student at guidance g answers as the teacher's v_u + g (v_c - v_u)."""
    net = make_transformer()
    net.load_state_dict(teacher.state_dict())
    saved = folder / "guided.pt"
    if saved.exists():
        net.load_state_dict(torch.load(saved, weights_only=True))
        return net.eval().requires_grad_(False)
    latents, prompts = cached(folder / "data.pt", lambda: data_set(vae, 60_000, seed=4))
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=steps, pct_start=0.1)
    shadow = {n: p.detach().clone() for n, p in net.named_parameters()}
    with torch.no_grad():
        empty = encoder([""])

    def loss_of(x: Tensor, t: Tensor, g: Tensor, c: Tensor, p: Tensor, target: Tensor) -> Tensor:
        return (call(net, x, t, (c, p), g) - target).square().mean()

    step_loss, ask = torch.compile(loss_of), torch.compile(call)
    rng, total, start = torch.Generator().manual_seed(6), 0.0, time.time()
    for step in range(steps):
        pick = torch.randint(len(latents), (batch,), generator=rng).tolist()
        t = torch.sigmoid(torch.randn(batch, generator=rng) + 0.6)
        g = 1 + 4 * torch.rand(batch, generator=rng) * (torch.rand(batch, generator=rng) > 0.15)
        x0 = latents[pick]
        x = torch.lerp(x0, torch.randn(x0.shape, generator=rng), t[:, None, None])
        with torch.no_grad():
            c, p = encoder([prompts[i] for i in pick])
            ones = torch.ones(batch)
            vc = ask(teacher, x, t, (c, p), ones)
            vu = ask(teacher, x, t, (empty[0].expand_as(c), empty[1].expand_as(p)), ones)
        loss = step_loss(x, t, g, c, p, vu + g[:, None, None] * (vc - vu))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(shadow.values()), [q.detach() for q in net.parameters()], 0.005)
        total += loss.item()
        if (step + 1) % 100 == 0:
            log(f"guidance {step + 1} loss {total / 100:.5f} {(time.time() - start) / (step + 1):.3f} s/step")
            total = 0.0
    torch.save(shadow, saved)
    net.load_state_dict(shadow)
    return net.eval().requires_grad_(False)


# --- stage 5: the bundle --------------------------------------------------------------------------


def write_bundle(out: Path, encoder: Encoder, vae: Any, net: Any) -> None:
    """Everything in the ordinary diffusers folder layout, weights in float16 to be small."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    FluxPipeline(
        scheduler=scheduler,
        vae=vae.half(),
        text_encoder=encoder.clip.half(),
        tokenizer=encoder.clip_tokenizer,
        text_encoder_2=encoder.t5.half(),
        tokenizer_2=encoder.t5_tokenizer,
        transformer=net.half(),
    ).save_pretrained(out)
    defaults = {"size": f"{WIDTH}x{HEIGHT}", "steps": 28, "guidance": 3.0}
    (out / "flowkit.json").write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    log(
        f"wrote {sum(f.stat().st_size for f in out.rglob('*.safetensors')) / 2**20:.1f} MB of weights to {out}"
    )


def main() -> None:
    """Command line of the build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", choices=["tiny-flux"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=["text", "vae", "flow", "guidance", "write"], default="write")
    parser.add_argument("--flow-steps", type=int, default=3_200)
    parser.add_argument("--guidance-steps", type=int, default=700)
    args = parser.parse_args()
    torch.manual_seed(0)
    work = args.out / ".build"
    work.mkdir(parents=True, exist_ok=True)
    encoder = train_text(work)
    if args.stage == "text":
        return
    vae = train_vae(work)
    if args.stage == "vae":
        return
    net = train_flow(work, encoder, vae, args.flow_steps)
    if args.stage == "flow":
        return
    net = train_guidance(work, encoder, vae, net, args.guidance_steps)
    write_bundle(args.out, encoder, vae, net)


if __name__ == "__main__":
    main()
