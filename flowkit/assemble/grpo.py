"""`flowkit grpo`: from a resolved config to a finished run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flowkit.assemble.common import (
    cache_folder,
    harmless,
    inputs,
    model_of,
    prepare,
    prompt_files,
    weights_of,
)
from flowkit.assemble.students import put_on, student_of
from flowkit.config.load import Resolved, dump
from flowkit.config.schema import GrpoConfig
from flowkit.evaluate.heldout import evaluate
from flowkit.flow.windows import trained_steps
from flowkit.generate import Recipe, draw, grid_of
from flowkit.models import Cond, FlowModel, checkpoint_activations, lora
from flowkit.models.files import fingerprint
from flowkit.models.text import encode_all
from flowkit.rewards.pool import RewardPool
from flowkit.rollout import Walk
from flowkit.run import drive
from flowkit.runtime import dist as processes
from flowkit.runtime.clips import save_sheet, thumbnail
from flowkit.runtime.dist import Dist
from flowkit.runtime.folder import open_folder
from flowkit.runtime.log import Metrics, check
from flowkit.runtime.progress import Progress
from flowkit.trainers.grpo import World, logp_floor, train
from flowkit.trainers.state import LearningRate, TrainState, Weights


def run(resolved: Resolved[GrpoConfig], *, resume: Path | None, fresh: bool, force: bool) -> None:
    """Train to `steps`, from the newest checkpoint of the run folder if there is one.

    Raises:
        UserError, UsageError: as their places say; nothing of an earlier checkpoint is lost.
        SystemExit: 130 or 143 after a signal, with a checkpoint saved.
    """
    cfg = resolved.config
    with ExitStack() as stack:
        dist = stack.enter_context(processes.init(cfg.device))
        dist.on_main(lambda: check(cfg.report_to))
        train_prompts, test_prompts = dist.on_main(lambda: prompt_files(cfg))
        model = model_of(cfg, str(dist.device))
        pool = stack.enter_context(RewardPool(cfg.reward, cfg.reward_workers, cfg.reward_batch))
        pool.check([*train_prompts, *test_prompts])
        opened = stack.enter_context(
            open_folder(
                Path(cfg.out),
                dump(cfg),
                seed=cfg.seed,
                resume=resume,
                fresh=fresh,
                force=force,
                dist=dist,
                harmless=harmless(cfg.optim),
                inputs={**inputs(model, train_prompts), **student_input(cfg)},
            )
        )
        conds = encode(model, [p.text for p in (*train_prompts, *test_prompts)], cfg, dist)
        if (
            cfg.gradient_checkpointing
        ):  # not earlier: it loads the network, and the text encoders are gone now
            checkpoint_activations(model)
        state = TrainState.new(
            trained(model, cfg),
            rate=LearningRate(
                cfg.optim.lr,
                cfg.optim.warmup,
                cfg.optim.decay,
                total=cfg.steps * cfg.policy.epochs * cfg.policy.updates,
            ),
            betas=cfg.optim.betas,
            eps=cfg.optim.eps,
            weight_decay=cfg.optim.weight_decay,
            grad_clip=cfg.optim.grad_clip,
            ema_decay=cfg.ema.decay,
            ema_interval=cfg.ema.interval,
        )
        if opened.checkpoint is not None:
            state.load(opened.checkpoint)
        world = World(
            model=model,
            conds=conds,
            prompts=train_prompts,
            submit=pool.submit,
            reference=lambda: lora.reference(model),
            latent=model.latent_shape(cfg.pixels),
        )
        walk = walk_of(model, cfg)
        progress = stack.enter_context(Progress(cfg.steps, start=state.step, main=dist.main))
        metrics = Metrics(
            opened.folder,
            cfg.report_to,
            after=opened.step,
            enabled=dist.main,
        )
        stack.callback(metrics.close)
        floor = max(dist.gather_objects(logp_floor(world, walk, cfg)))
        say_floor(floor, cfg, progress)

        def held_out(offset: int = len(train_prompts)) -> dict[str, float]:
            asked = test_prompts[: cfg.eval.limit]
            recipe = recipe_of(cfg, steps=cfg.eval.steps, guidance=cfg.eval.guidance)
            with state.averaged():
                return evaluate(
                    model,
                    lambda rows: conds([offset + i for i in rows]),
                    asked,
                    pool.submit,
                    recipe,
                    cfg.eval.batch,
                    cfg.seed,
                    dist,
                )

        def preview(path: Path, offset: int = len(train_prompts)) -> None:
            if not dist.main:
                return
            jobs = [(i, cfg.seed) for i in range(min(cfg.preview.prompts, len(test_prompts)))]
            recipe = recipe_of(cfg, steps=cfg.eval.steps, guidance=cfg.eval.guidance)
            shown = []
            for weights in ("raw", "ema"):
                with ExitStack() as swapped:
                    if weights == "ema":
                        swapped.enter_context(state.averaged())
                    for part, media in draw(
                        model, lambda rows: conds([offset + i for i in rows]), jobs, recipe, cfg.eval.batch
                    ):
                        shown += [
                            (f"{weights} {i}", thumbnail(media.pixels[n])) for n, (i, _) in enumerate(part)
                        ]
            about = {"prompts": [test_prompts[i].text for i, _ in jobs], "step": state.step}
            save_sheet(path, [p for _, p in shown], len(jobs), [label for label, _ in shown], about)

        drive(
            ({**row, "logp_floor": floor} for row in train(world, walk, cfg, state, dist)),
            state,
            folder=opened.folder,
            steps=cfg.steps,
            checkpoint_every=cfg.checkpoint.every,
            keep=cfg.checkpoint.keep,
            evaluate=held_out,
            eval_every=cfg.eval.every,
            preview=preview,
            preview_every=cfg.preview.every,
            metrics=metrics,
            progress=progress,
            dist=dist,
        )


def trained(model: FlowModel, cfg: GrpoConfig) -> Weights:
    """Make the configured weights trainable, keep what they are compared with, and say how they are written."""
    info: dict[str, Any] = {"trained": {"algorithm": "grpo", "seed": cfg.seed}, "sampler": sampler_of(cfg)}
    if cfg.student is None:
        prepare(model, cfg)
    else:
        student = student_of(cfg.student)
        put_on(model, student)
        if cfg.train == "full":
            lora.train_all(model)
        info = {**info, "kind": "student", "sampler": {**student.sampler, **sampler_of(cfg)}}
    if cfg.policy.kl > 0 and (cfg.train == "full" or cfg.student is not None):
        lora.keep_reference(model)
    return weights_of(model, cfg, lora.trainable(model), info)


def student_input(cfg: GrpoConfig) -> dict[str, str]:
    """Fingerprint of the student that the run goes on from: a resumed run must find the same."""
    if cfg.student is None:
        return {}
    return {"student": fingerprint([student_of(cfg.student).path])}


def sampler_of(cfg: GrpoConfig) -> dict[str, object]:
    """How the trained weights are sampled, for their header; a student's sampler is its own."""
    if cfg.student is not None:
        settings = cfg.rollout.schedule.settings
        return {**settings, "schedule": {"name": "student", **settings}, "size": cfg.size}
    return {
        "law": "ode",
        "steps": cfg.eval.steps or cfg.rollout.steps,
        "guidance": cfg.rollout.guidance if cfg.eval.guidance is None else cfg.eval.guidance,
        "guidance_distilled": False,
        "schedule": {"name": cfg.rollout.schedule.name, **cfg.rollout.schedule.settings},
    }


def encode(
    model: FlowModel, texts: Sequence[str], cfg: GrpoConfig, dist: Dist
) -> Callable[[Sequence[int]], Cond]:
    """Conditions by prompt index, encoded once for all processes."""
    cache = cache_folder()
    if dist.world > 1:
        dist.on_main(lambda: encode_all(model, texts, cache, cfg.text_batch) and None)
    table = encode_all(model, texts, cache, cfg.text_batch)
    return lambda rows: table[rows].to(dist.device)


def walk_of(model: FlowModel, cfg: GrpoConfig) -> Walk:
    """How the config's rollouts are walked."""
    r = cfg.rollout
    grid = grid_of(model, r.steps, cfg.pixels, r.schedule.name, r.schedule.settings)
    return Walk(
        grid=grid.to(model.device),
        law=r.law,
        level=r.level,
        t_at_one=None if r.t_at_one == "next" else float(r.t_at_one),
        reduction=cfg.policy.log_prob,
        length=r.window.size if r.window else len(trained_steps(r.steps, r.train_fraction)),
    )


def recipe_of(cfg: GrpoConfig, *, steps: int | None, guidance: float | None) -> Recipe:
    """The plain ODE on the rollout's schedule, or a student's own law; what is None is the rollout's."""
    r = cfg.rollout
    return Recipe(
        steps=steps or r.steps,
        size=cfg.pixels,
        guidance=r.guidance if guidance is None else guidance,
        law="ode" if cfg.student is None else r.law,
        schedule=r.schedule.name,
        settings=r.schedule.settings,
    )


def say_floor(floor: float, cfg: GrpoConfig, progress: Progress) -> None:
    """Print how much of a log-probability is arithmetic, and warn where the clip range is not above it."""
    text = f"logp_floor {floor:.2g}: what the batch shape alone moves a log-probability; clip {cfg.policy.clip:g}"
    if floor >= cfg.policy.clip:
        text += ". The clip range is under the floor: raise policy.clip, or use dtype=float32"
    progress.note(text)
