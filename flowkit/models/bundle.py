"""A model's folder: found by name, checked file by file, loaded one component at a time.

A name is `builtin:NAME` (inside the package), a folder in the diffusers layout, or a hub id `owner/name`.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.config.sections import parse_size
from flowkit.errors import UsageError, UserError
from flowkit.models import files
from flowkit.types import Size

if TYPE_CHECKING:
    import torch
    from torch import nn

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PRESET = "run what needs no download now: `--preset tiny-ocr`"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast", "ByT5Tokenizer")


@dataclass(frozen=True)
class Defaults:
    """How a model is sampled where nobody says otherwise."""

    size: Size
    steps: int
    guidance: float


FAMILY_DEFAULTS: Mapping[str, Defaults] = {
    "flux": Defaults(Size(1024, 1024), 28, 3.5),
    "sd3": Defaults(Size(1024, 1024), 28, 4.5),
    "wan": Defaults(Size(832, 480, 81), 50, 5.0),
}


@dataclass(frozen=True)
class Bundle:
    """A folder in the diffusers layout, its index read, its weights not.

    Attributes:
        name: as the user gave it.
        folder: where its files are.
        index: model_index.json: component -> [library, class].
    """

    name: str
    folder: Path
    index: Mapping[str, Any]

    @property
    def pipeline(self) -> str:
        """Class name of the diffusers pipeline that the folder was saved from."""
        return str(self.index.get("_class_name", ""))

    def has(self, component: str) -> bool:
        """Whether the index lists this component (`[null, null]` says that it was left out)."""
        entry = self.index.get(component)
        return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None

    def config(self, component: str) -> dict[str, Any]:
        """The json of one component.

        Raises:
            UserError: missing or broken; says what to do.
        """
        file = "scheduler_config.json" if component == "scheduler" else "config.json"
        config: dict[str, Any] = self._told(lambda: files.read_json(self.folder / component / file))
        return config

    def weights(self, component: str) -> list[Path]:
        """The component's safetensors files, each with a sound header and its full length.

        Raises:
            UserError: missing, only pickles, or a file that `files.read_header` refuses.
        """
        folder = self.folder / component
        for stem in ("diffusion_pytorch_model", "model"):
            index = folder / f"{stem}.safetensors.index.json"
            single = folder / f"{stem}.safetensors"
            if index.exists():
                shards = self._told(lambda index=index: files.read_json(index)).get("weight_map", {})
                paths = [folder / name for name in sorted(set(shards.values()))]
            elif single.exists() or single.is_symlink():
                paths = [single]
            else:
                continue
            for path in paths:
                self._told(lambda path=path: files.read_header(path))
            return paths
        pickles = [p.name for p in sorted(folder.glob("*")) if p.suffix in {".bin", ".pt", ".pth", ".ckpt"}]
        if pickles:
            raise UserError(
                f"{self.name} keeps its {component} as a pickle ({pickles[0]}), which is never opened; "
                f"get its safetensors version, or {PRESET}."
            )
        raise UserError(f"{self.name} has no weights in {folder}; {self.advice}.")

    def check(self, components: Iterable[str]) -> None:
        """Read every config and weight header now, so that a long run does not die of one later."""
        for component in components:
            self.config(component)
            self.weights(component)

    def fingerprint(self, component: str) -> str:
        """Digest of the component's config and weights (sampled, see `files.fingerprint`)."""
        return files.fingerprint([self.folder / component / "config.json", *self.weights(component)])

    def load(self, component: str, library: str, kind: str, dtype: torch.dtype, device: torch.device) -> Any:
        """One network, frozen, in eval mode, cast to `dtype` whatever dtype the files have.

        Args:
            component: folder and index name, such as `transformer`.
            library: `diffusers` or `transformers`.
            kind: the class that the family expects.
            dtype: of the parameters.
            device: where to.

        Raises:
            UserError: files that do not fit the class: keys missing, keys left over, shapes that differ.
        """
        self.weights(component)
        cls = getattr(importlib.import_module(library), kind)
        key = "torch_dtype" if library == "diffusers" else "dtype"
        importlib.import_module(
            f"{library}.utils.logging"
        ).disable_progress_bar()  # stderr is for our own lines
        try:
            net, info = cls.from_pretrained(
                str(self.folder / component),
                **{key: dtype},
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
            raise UserError(
                f"The {component} of {self.name} does not load as {kind} ({reason}); {self.advice}."
            ) from error
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            keys = sorted(str(k) for k in info.get(problem, ()))
            if keys:
                raise UserError(
                    f"The {component} of {self.name} does not fit {kind}: {len(keys)} "
                    f"{problem.replace('_', ' ')}, such as {keys[0]}; {self.advice}."
                )
        module: nn.Module = net
        return module.to(device).eval().requires_grad_(False)

    def tokenizer(self, component: str) -> Any:
        """One tokenizer, of the class that the index names.

        Raises:
            UserError: a class that is not known, or files that are missing or broken.
        """
        kind = str(self.index[component][1])
        if kind not in _TOKENIZERS:
            raise UserError(
                f"{self.name} wants {kind} as its {component}; known are {', '.join(_TOKENIZERS)}."
            )
        folder = self.folder / component
        if not folder.is_dir():
            raise UserError(f"{self.name} has no {component} folder; {self.advice}.")
        for path in folder.glob("*.json"):
            self._told(lambda path=path: files.read_json(path))
        transformers = importlib.import_module("transformers")
        try:
            return getattr(transformers, kind).from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
            raise UserError(
                f"The {component} of {self.name} does not load ({reason}); {self.advice}."
            ) from error

    def defaults(self, family: str) -> Defaults:
        """The bundle's own defaults, from its flowkit.json if it has one, else those of its family.

        Raises:
            UserError: a flowkit.json that does not say size, steps and guidance.
        """
        path = self.folder / "flowkit.json"
        if not path.exists():
            return FAMILY_DEFAULTS[family]
        found = self._told(lambda: files.read_json(path))
        try:
            return Defaults(parse_size(found["size"]), int(found["steps"]), float(found["guidance"]))
        except (KeyError, ValueError, TypeError, AttributeError):
            raise UserError(f"{path} needs size, steps and guidance; {self.advice}.") from None

    @cached_property
    def advice(self) -> str:
        """How to mend this model, and what runs without it."""
        if self.name.startswith("builtin:"):
            return "reinstall flowkit, whose package holds it"
        if self.folder == Path(self.name).expanduser():
            return f"copy or download the model folder again, or {PRESET}"
        return f"get it with `hf download {self.name}`, or {PRESET}"

    def _told(self, read: Any) -> Any:
        """The result of `read`; its refusal gets the model's name and the advice."""
        try:
            return read()
        except UserError as error:
            raise UserError(f"{self.name}: {str(error).rstrip('.')}; {self.advice}.") from None


def resolve(name: str, *, weights: bool = True) -> Bundle:
    """Find a model by name; a hub id is fetched or taken from the cache, its weights only when asked.

    Raises:
        UserError: not there: one sentence with the model, the way to get it, and the embedded preset.
        UsageError: a name of no known form.
    """
    if name.startswith("builtin:"):
        folder = ASSETS / name.removeprefix("builtin:")
        if not (folder / "model_index.json").exists():
            known = [p.parent.name for p in sorted(ASSETS.glob("*/model_index.json"))]
            near = difflib.get_close_matches(folder.name, known, 1)
            hint = f"did you mean builtin:{near[0]}?" if near else f"known are: {', '.join(known) or 'none'}."
            raise UsageError(f"There is no embedded model {name}; {hint}")
        return _open(name, folder)
    path = Path(name).expanduser()
    if path.exists():
        if not (path / "model_index.json").exists():
            raise UserError(
                f"{name} is not a diffusers model folder (it has no model_index.json); pass the folder "
                f"that holds transformer/ and vae/, or {PRESET}."
            )
        return _open(name, path)
    if not _HUB_ID.fullmatch(name):
        raise UserError(
            f"There is no model folder {name}, and it is neither a hub id (owner/name) nor builtin:NAME; "
            f"check the path, or {PRESET}."
        )
    folder = _fetch(name, ["model_index.json", "*/*.json"])
    if not (folder / "model_index.json").exists():
        raise UserError(
            f"{name} is not a diffusers model (it has no model_index.json); choose another, or {PRESET}."
        )
    bundle = _open(name, folder)
    if weights:
        parts = [c for c in bundle.index if bundle.has(c)]
        patterns = [f"{c}/{end}" for c in parts for end in ("*.json", "*.safetensors", "*.txt", "*.model")]
        _fetch(name, ["model_index.json", *patterns])
    return bundle


def _open(name: str, folder: Path) -> Bundle:
    """A bundle over a folder that has a model_index.json."""
    empty = Bundle(name, folder, {})
    return Bundle(name, folder, empty._told(lambda: files.read_json(folder / "model_index.json")))


def _fetch(name: str, patterns: list[str]) -> Path:
    """The snapshot folder of a hub id, from the cache when the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*.fp16*", "*.fp8*"]))
    except GatedRepoError:
        raise UserError(
            f"{name} is gated: accept its licence on its model page and log in with "
            f"`hf auth login`, or {PRESET}."
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"There is no model {name} on the hub that your login may read, and no folder of that name; "
            f"check the spelling or log in with `hf auth login`, or {PRESET}."
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise UserError(
            f"The weights of {name} are not on this machine and the hub cannot be reached; get them with "
            f"`hf download {name}` where there is a network and give their folder as the model, or {PRESET}."
        ) from None
