"""Plant faults into flowkit/flow and flowkit/ops, one at a time, and see that a test turns red for each.

    python tests/mutants.py            all of them; exits 1 when one survives or no longer applies
    python tests/mutants.py clip ema   those whose name holds one of the words

Each fault is a text replacement in a copy of the package, in a temporary folder, with its tests beside it.
"""

# ruff: noqa: E501 (one fault a line reads as a table)
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# Long enough for a slow machine; a fault that makes the tests hang has been noticed, too.
LIMIT_S = 600


@dataclass(frozen=True)
class Fault:
    """One replacement that must occur exactly once in its file: of flowkit/flow, or with its folder of flowkit/."""

    name: str
    file: str
    right: str
    wrong: str

    @property
    def path(self) -> str:
        """From the root of the repository."""
        return f"flowkit/{self.file}" if "/" in self.file else f"flowkit/flow/{self.file}"

    @property
    def tests(self) -> list[str]:
        """Where it should be noticed, the likeliest place first."""
        if "/" not in self.file:
            return [f"tests/flow/test_{self.file}", "tests/flow"]
        layer, module = self.file.split("/")[:2]
        return [f"tests/{layer}/test_{module}.py"]


FAULTS = [
    # path
    Fault("velocity of the other sign", "path.py", "return eps - x0", "return x0 - eps"),
    Fault("times of half precision let in", "path.py", "(torch.float32, torch.float64)", "(t.dtype,)"),
    # schedules
    Fault("shift applied twice", "schedule.py", "_shifted(_base(n), shift)", "_shifted(_shifted(_base(n), shift), shift)"),
    Fault("shift that moves one", "schedule.py", "k * t / (k * t + (1 - t))", "k * t / (1 + (k - 1) * t)"),
    Fault("unshift is shift", "schedule.py", "t / (t + k * (1 - t))", "k * t / (t * k + (1 - t))"),
    Fault("one stretched step is nan", "schedule.py", "if len(inner) == 1:", "if len(inner) == 0:"),
    Fault("stretched to the wrong end", "schedule.py", "(1 - terminal) / (1 - inner[-1])", "(1 - terminal) / inner[0]"),
    Fault("sd3-rl shifted once", "schedule.py", "shift * 1e-3 / (1 + (shift - 1) * 1e-3)", "1e-3"),
    Fault("mu over the wrong span", "schedule.py", "/ (tokens_hi - tokens_lo)", "/ tokens_hi"),
    Fault("base grid that ends at 0", "schedule.py", "1 / max(n, 1)", "0.0"),
    Fault("logit power forgotten", "schedule.py", "(1 / _base(n) - 1) ** b / a", "(1 / _base(n) - 1) / a"),
    Fault("power without its root", "schedule.py", "** rho, dtype)", "** (rho - 1), dtype)"),
    # laws
    Fault("factor 2 in the drift", "laws.py", "g**2 / (2 * t)", "g**2 / t"),
    Fault("dt of the other sign", "laws.py", "dt = s - t\n    pull", "dt = t - s\n    pull"),
    Fault("missing square root of dt", "laws.py", "g * (-dt).sqrt()", "g * (-dt)"),
    Fault("missing square root in g", "laws.py", "(t / (1 - tilde)).sqrt()", "(t / (1 - tilde))"),
    Fault("t clamped at one", "laws.py", "s if t_at_one is None else as_time(t_at_one).to(t)", "torch.full_like(t, 0.99)"),
    Fault("stand-in used at every t", "laws.py", "torch.where(t == 1,", "torch.where(t <= 1,"),
    Fault("noise of x0 in the drift", "laws.py", "(1 + pull * (1 - t))", "(1 - pull * t)"),
    Fault("cps with half the angle", "laws.py", "s * math.sin(level * math.pi / 2)", "s * math.sin(level * math.pi / 4)"),
    Fault("cps that is not euler at level 0", "laws.py", "mean, _ = ode(x, v, t, s)", "mean = expand(1 - as_time(s), x) * x0_of(x, v, t) + expand(s, x) * eps_of(x, v, t)"),
    Fault("cps that forgets to lose noise", "laws.py", "level * math.pi / 4) ** 2", "level * math.pi / 4)"),
    Fault("consistency that keeps t", "laws.py", "expand(1 - as_time(s), x)", "expand(1 - as_time(t), x)"),
    Fault("levels unchecked", "laws.py", "if not 0 <= level <= most:", "if level > most:"),
    Fault("log-probability without its half", "laws.py", "(2 * std**2)", "std**2"),
    Fault("log-probability without log std", "laws.py", " - std.log()", ""),
    Fault("log-probability without constant", "laws.py", " - 0.5 * math.log(2 * math.pi)", ""),
    Fault("sum for mean", "laws.py", 'reduction == "mean":\n        return flat.mean(1)', 'reduction == "mean":\n        return flat.sum(1)'),
    Fault("std 0 let through", "laws.py", "positive = (std > 0).all()", "positive = (std > 0).any()"),
    Fault("unit with a half", "laws.py", "-square.reshape(len(y), -1).mean(1)", "-square.reshape(len(y), -1).mean(1) / 2"),
    Fault("rate of the law without dt", "laws.py", "(as_time(t) - as_time(s)).sqrt()", "(as_time(t) - as_time(s))"),
    # solvers
    Fault("heun without its half", "solvers.py", "velocity(ahead, _batch(s, x))) / 2", "velocity(ahead, _batch(s, x)))"),
    Fault("heun that looks back", "solvers.py", "velocity(ahead, _batch(s, x))", "velocity(ahead, _batch(t, x))"),
    Fault("heun that calls at 0", "solvers.py", "if s > 0:", "if s >= 0:"),
    # windows
    Fault("window that starts one too late", "windows.py", "randint(lo, hi - size + 1,", "randint(lo + 1, hi - size + 2,"),
    Fault("last window never drawn", "windows.py", "hi - size + 1, ()", "max(lo + 1, hi - size), ()"),
    Fault("trained steps rounded up", "windows.py", "math.floor(n * fraction + 1e-9)", "math.ceil(n * fraction)"),
    Fault("trained steps cut by rounding", "windows.py", " + 1e-9)", ")"),
    # policy
    Fault("biased for unbiased std", "policy.py", "((r - r.mean()) ** 2).mean().sqrt()", "r.std()"),
    Fault("epsilon of the std forgotten", "policy.py", "else spread) + eps)", "else spread))"),
    Fault("mean of nobody", "policy.py", "(own - mean) / (", "own / ("),
    Fault("nan kept in its group", "policy.py", "    scored = r.isfinite()\n", "    scored = torch.ones_like(r, dtype=torch.bool)\n"),
    Fault("infinity kept in its group", "policy.py", "    scored = r.isfinite()\n", "    scored = ~r.isnan()\n"),
    Fault("zero spread unnoticed", "policy.py", "if len(own) < 2 or own.max() == own.min():", "if len(own) < 2:"),
    Fault("rounding noise from equal rewards", "policy.py", "own.max() == own.min()", "spread_of_all < 0"),
    Fault("group std for global", "policy.py", 'if std == "global" else spread', 'if std == "group" else spread'),
    Fault("advantage clamped on one side", "policy.py", "values.clamp(-clip, clip)", "values.clamp(max=clip)"),
    Fault("run without this round", "policy.py", "else history.add(r, group)", "else history"),
    Fault("moments joined without distance", "policy.py", " + apart**2 * n0 * n / both", ""),
    Fault("used samples unmarked", "policy.py", "        used |= members\n", ""),
    Fault("minimum for maximum", "policy.py", "torch.maximum(", "torch.minimum("),
    Fault("clip of the wrong sign", "policy.py", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(1 + clip, 1 - clip)"),
    Fault("clip on one side", "policy.py", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(max=1 + clip)"),
    Fault("loss of the wrong sign", "policy.py", "-advantage * ratio, -", "advantage * ratio, -"),
    Fault("ratio upside down", "policy.py", "ratio = (logp_new - logp_old).exp()\n    return", "ratio = (logp_old - logp_new).exp()\n    return"),
    Fault("path kl without its 2", "policy.py", "(2 * g**2)", "g**2"),
    Fault("exact kl without its 2", "policy.py", "(2 * std**2)", "std**2"),
    Fault("kl by the wrong noise", "policy.py", "kl_path(new.mean, ref.mean, new.g)", "kl_path(new.mean, ref.mean, new.std)"),
    Fault("kl without gradient", "policy.py", "    return values.reshape", "    return values.detach().reshape"),
    Fault("clip statistics of the wrong side", "policy.py", "(ratio < 1 - clip) & (advantage < 0)", "(ratio < 1 - clip) & (advantage > 0)"),
    Fault("approximate kl without its half", "policy.py", ".mean() / 2", ".mean()"),
    # ema
    Fault("interval off by one", "ema.py", "(step + 1) % self.interval", "step % self.interval"),
    Fault("no warm-up", "ema.py", "min((1 + step) / (10 + step), self.decay)", "self.decay"),
    Fault("warm-up off by one", "ema.py", "(1 + step) / (10 + step)", "(2 + step) / (11 + step)"),
    Fault("decay for its complement", "ema.py", "(1 - decay) * (_wide(p)", "decay * (_wide(p)"),
    Fault("swap that forgets a raising body", "ema.py", "        finally:\n            self._fill(kept)", "        except GeneratorExit:\n            pass\n        else:\n            self._fill(kept)"),
    Fault("swap that aliases", "ema.py", "{name: p.detach().clone() for name, p in self._params.items()}", "{name: p.detach() for name, p in self._params.items()}"),
    Fault("average in half precision", "ema.py", "torch.promote_types(p.dtype, torch.float32)", "p.dtype"),
    Fault("average that is the parameter", "ema.py", "_wide(p).clone()", "_wide(p)"),
    Fault("a step taken in twice", "ema.py", "if step <= self._last:", "if step < self._last:"),
    Fault("power average with another root", "ema.py", "x = 1 / s\n", "x = 0.0\n"),
    Fault("power average off by one", "ema.py", "(1 - 1 / (i + 1)) ** (gamma + 1)", "(1 - 1 / (i + 1)) ** gamma"),
    Fault("power average that keeps its start", "ema.py", "0.0 if i < 1 else", "0.5 if i < 1 else"),
    Fault("warm-up of a decay that is a function", "ema.py", "return self.decay(step)", "return min((1 + step) / (10 + step), self.decay(step))"),
    # wrappers
    Fault("velocity of trigflow of the wrong sign", "wrappers.py", "((c - s) / (c + s), 1 / (c + s))", "((s - c) / (c + s), 1 / (c + s))"),
    Fault("x not rescaled", "wrappers.py", "network(expand(k.c_in, x) * x, raw)", "network(x, raw)"),
    Fault("time in half precision", "wrappers.py", "k.c_noise.to(torch.promote_types(x.dtype, torch.float32))", "k.c_noise.to(torch.promote_types(x.dtype, torch.float32)).to(torch.bfloat16).to(torch.float32)"),
    Fault("x0 without its sine", "wrappers.py", "expand(c, x) * x - expand(s, x) * F", "expand(c, x) * x - F"),
    Fault("unwrapped velocity of the wrong sign", "wrappers.py", "expand(c + s, x) * F - expand(c - s, x) * x", "expand(c + s, x) * F + expand(c - s, x) * x"),
    Fault("eps of the wrong sign", "wrappers.py", "(-s / c, 1 / c)", "(s / c, 1 / c)"),
    Fault("v not divided by its scale", "wrappers.py", "(torch.zeros_like(c), 1 / k)", "(torch.zeros_like(c), torch.ones_like(c))"),
    Fault("data of EDM with std 1", "wrappers.py", "(1 - self.sigma_data**2) / d**2", "(1 - self.sigma_data) / d**2"),
    Fault("table read one entry late", "wrappers.py", "(torch.searchsorted(at, seen.detach()) - 1)", "(torch.searchsorted(at, seen.detach()) + 1)"),
    # times
    Fault("log-normal of the log of time", "times.py", "z).exp()).atan()", "z).exp())"),
    Fault("shift that divides sigma", "times.py", "(self.shift * (self.mean", "(1 / self.shift * (self.mean"),
    Fault("uniform without its shift", "times.py", "torch.atan2(self.k * u, 1 - u)", "torch.atan2(u, 1 - u)"),
    Fault("density without its slope", "times.py", "/ (self.std * theta.sin() * theta.cos())", "/ self.std"),
    Fault("interval of the angle", "times.py", "theta_of(self.lo).to(like.device), theta_of(self.hi)", "torch.tensor(self.lo * math.pi / 2), torch.tensor(self.hi * math.pi / 2)"),
    Fault("strata in order", "times.py", "torch.randperm(n, generator=generator, device=device)", "torch.arange(n, device=device)"),
    Fault("bell not normalised", "times.py", "bell / bell.mean()", "bell"),
    Fault("bell upside down in time", "times.py", "torch.arange(n, 0, -1,", "torch.arange(1, n + 1, 1,"),
    # consistency
    Fault("tangent that is not warmed", "consistency.py", "(r * c * s * x.double() + J.double())\n", "(c * s * x.double() + J.double())\n"),
    Fault("J warmed with data", "consistency.py", "- (r * c * s * x.double() + J.double())", "- r * (c * s * x.double() + J.double())"),
    Fault("J not warmed with all", "consistency.py", "- r * (c * s * x.double() + J.double())", "- (r * c * s * x.double() + J.double())"),
    Fault("root of the warm-up forgotten", "consistency.py", "-c * (1 - r**2 * s**2).sqrt() * apart", "-c * c * apart"),
    Fault("tangent of the wrong sign", "consistency.py", "g = -c * (1", "g = c * (1"),
    Fault("factor 2 in the tangent", "consistency.py", "g = -c * (1", "g = -2 * c * (1"),
    Fault("norm over the batch", "consistency.py", "torch.linalg.vector_norm(g.flatten(1), dim=1)", "torch.linalg.vector_norm(g).expand(len(g))"),
    Fault("tangent that is not normalised", "consistency.py", "(g / expand(norm + NORM_OFFSET, g))", "(g / expand(torch.ones_like(norm), g))"),
    Fault("loss away from g", "consistency.py", "- F_minus.detach().double() - g.double()", "- F_minus.detach().double() + g.double()"),
    Fault("loss without a stop", "consistency.py", "F_minus.detach().double()", "F_minus.double()"),
    Fault("mean for sum in the loss", "consistency.py", "** 2).flatten(1).sum(1)", "** 2).flatten(1).mean(1)"),
    Fault("tangent of time not scaled", "consistency.py", "(expand(cs, x) * F_T, cs.to(theta))", "(expand(cs, x) * F_T, torch.ones_like(theta))"),
    Fault("time differentiated twice", "consistency.py", "torch.zeros_like(theta))", "_cs(theta).to(theta))"),
    Fault("difference over 2 h", "consistency.py", "_cs(theta) / h.sin()", "_cs(theta) / (2 * h).sin()"),
    Fault("difference without its turn", "consistency.py", "expand(h.cos(), wide) * wide - before", "wide - before"),
    Fault("teacher's step forwards", "consistency.py", "* x - expand(h.sin(), x) * F_T", "* x + expand(h.sin(), x) * F_T"),
    Fault("times below 0", "consistency.py", "clamp(min=1e-30, max=h)", "clamp(min=h, max=h)"),
    Fault("step in the shifted time", "consistency.py", "t = unshift(t_of(theta), k)", "t = t_of(theta)"),
    Fault("target at the old time", "consistency.py", "return x0_of(after, theta_next, F(after, theta_next))", "return x0_of(after, theta, F(after, theta))"),
    Fault("discrete tangent without cos", "consistency.py", "rate = theta.cos() / (theta - theta_next)", "rate = 1 / (theta - theta_next)"),
    Fault("discrete tangent of the wrong sign", "consistency.py", "(f - x0_target.double())", "(x0_target.double() - f)"),
    # matching
    Fault("guidance from the wrong end", "matching.py", "F_u + w * (F_c - F_u)", "F_c + w * (F_c - F_u)"),
    Fault("angles that rise", "matching.py", ".cummin(0).values", ""),
    Fault("noise of the step before", "matching.py", "noise_of_step(step + 1)", "noise_of_step(step)"),
    Fault("gradient through every call", "matching.py", "        with torch.no_grad():\n            x0 = x0_of(x, theta", "        with torch.enable_grad():\n            x0 = x0_of(x, theta"),
    Fault("dmd of the wrong sign", "matching.py", "target = wide - (x0_fake", "target = wide + (x0_fake"),
    Fault("dmd without its weight", "matching.py", "- teacher) / expand(weight, wide)", "- teacher)"),
    Fault("dmd weight over the sum", "matching.py", ".flatten(1).mean(1).clamp", ".flatten(1).sum(1).clamp"),
    Fault("dmd weight without a floor", "matching.py", ".clamp(min=1e-5)", ""),
    Fault("critic without sin squared", "matching.py", "expand(s**2, G.double())", "expand(torch.ones_like(s), G.double())"),
    Fault("critic with sin for its square", "matching.py", "expand(s**2, G.double())", "expand(s, G.double())"),
    Fault("critic that moves the student", "matching.py", "(G.detach() - x0_fake)", "(G - x0_fake)"),
    Fault("turns from 0", "matching.py", "(i - self.warmup) % self.freq == 0", "i % self.freq == 0"),
    Fault("turns the other way round", "matching.py", "% self.freq == 0", "% self.freq != 0"),
    Fault("dmd in the warm-up", "matching.py", "return i >= self.warmup and self.student(i)", "return self.student(i)"),
    Fault("steps of the student without its warm-up", "matching.py", "self.warmup + (i - self.warmup) // self.freq", "(i - self.warmup) // self.freq"),
    Fault("steps of the critic off by one", "matching.py", "i - self.student_step(i) - 1", "i - self.student_step(i)"),
    # student
    Fault("student from sigma for its angle", "student.py", "math.atan(sigma_max), *mids][:n]", "math.pi / 2, *mids][:n]"),
    Fault("student with its first times last", "student.py", "*mids][:n], 0.0]", "*mids][-n:], 0.0]"),
    Fault("student's angles for times", "student.py", "return t_of(student_thetas(n, sigma_max, mids))", "return student_thetas(n, sigma_max, mids)"),
    # attention with its derivative
    Fault("block not rescaled", "ops/jvp_attention/blockwise.py", "O.mul_(rescale).baddbmm_", "O.baddbmm_"),
    Fault("tangent's block not rescaled", "ops/jvp_attention/blockwise.py", "                C.mul_(rescale)\n", ""),
    Fault("sum of H not rescaled", "ops/jvp_attention/blockwise.py", "r.mul_(rescale).add_", "r.add_"),
    Fault("block's tangent without r O", "ops/jvp_attention/blockwise.py", "C.addcmul_(r, O, value=-1)", "C"),
    Fault("blocks without the tangent of keys", "ops/jvp_attention/blockwise.py", "return tS if tk is None else tS.baddbmm_(q[:, rows], tk[:, cols].mT)", "return tS"),
    Fault("block's tangent of queries not scaled", "ops/jvp_attention/blockwise.py", "None if tq_ is None else tq_ * scale", "tq_"),
    Fault("nan in blocks without a key", "ops/jvp_attention/blockwise.py", "safe = top.masked_fill(top == -torch.inf, 0)", "safe = top"),
    Fault("triangle one key late", "ops/jvp_attention/blockwise.py", "triu(1 + rows.start", "triu(2 + rows.start"),
    Fault("gradient of blocks without its row sum", "ops/jvp_attention/blockwise.py", ".sub_(dot[:, rows])", ""),
    Fault("all scores in one block", "ops/jvp_attention/blockwise.py", "slice(start, min(start + size, length)) for start in range(0, length, size)", "slice(0, length) for _ in range(1)"),
    Fault("tangent without r O", "ops/jvp_attention/naive.py", "to += H @ v_ - H.sum(-1, keepdim=True) * o", "to += H @ v_"),
    Fault("sums in half precision", "ops/jvp_attention/naive.py", "torch.float64 if dtype == torch.float64 else torch.float32", "dtype"),
    Fault("heads shared in turns", "ops/jvp_attention/naive.py", "x.repeat_interleave(heads // x.shape[1], 1)", "x.repeat(1, heads // x.shape[1], 1, 1)"),
    Fault("default scale of the values' width", "ops/jvp_attention/__init__.py", "q.shape[3] ** -0.5 if", "v.shape[3] ** -0.5 if"),
]  # fmt: skip


def copy(place: Path) -> None:
    """What these tests need of the repository, and nothing that could import the original."""
    for part in ("flowkit/flow", "flowkit/ops", "tests/flow", "tests/ops", "tests/golden"):
        shutil.copytree(REPO / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("flowkit/__init__.py", "flowkit/types.py", "flowkit/errors.py"):
        shutil.copy(REPO / part, place / part)
    settings = "[pytest]\nfilterwarnings =\n  error\n  ignore:.*torch.jit.*:DeprecationWarning\npythonpath = .\nmarkers = slow: takes more than ten seconds\n"
    (place / "pytest.ini").write_text(settings, encoding="utf-8")


def run(place: Path, *argv: str) -> tuple[int, str]:
    """Run Python in the copy; the exit code, or -1 when it ran too long, and what it printed."""
    env = os.environ | {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=place,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "ran too long"
    return done.returncode, done.stdout


def copied_tests(place: Path, *tests: str) -> tuple[int, str]:
    """Run those of the copied tests that are not slow until one fails."""
    return run(
        place,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow",
        "--no-header",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *tests,
    )


def first_failure(output: str) -> str:
    """The test that noticed, from pytest's summary."""
    found = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        re.sub(r".*tests/(flow|ops)/", "", found[0])[:75] if found else output.strip().splitlines()[-1][:75]
    )


def main(words: list[str]) -> int:
    """Print one line per fault; 0 when every one was caught."""
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    if not chosen:
        print(f"no fault has a name with {' or '.join(words)}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        copy(place)
        where = run(place, "-c", "import flowkit.flow; print(flowkit.flow.__file__)")[1]
        if str(place) not in where:
            print(f"the copy is not what gets imported, but {where}")
            return 1
        code, output = copied_tests(place, *sorted({fault.tests[-1] for fault in chosen}))
        if code:
            print(f"the tests fail without any fault: {first_failure(output)}")
            return 1
        bad = 0
        for fault in chosen:
            target = place / fault.path
            text = target.read_text(encoding="utf-8")
            if text.count(fault.right) != 1:
                verdict, note = "NOT APPLIED", f"{text.count(fault.right)} places match in {fault.file}"
            else:
                target.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
                code, output = copied_tests(place, *fault.tests)
                target.write_text(text, encoding="utf-8")
                # 1: a test failed; 2: a module did not even import; anything else says nothing of the fault.
                verdict = {0: "SURVIVED", 1: "caught", 2: "caught", -1: "caught"}.get(code, "NOT RUN")
                note = "" if code == 0 else first_failure(output)
            bad += verdict != "caught"
            print(f"{verdict:11}  {Path(fault.file).name:12} {fault.name:36} {note}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
