"""Three networks of one family for distillation: the student, the teacher it learns from, and the fake score.

Either three copies of the weights, or one frozen base with two adapters, whose teacher is the base itself
with the adapters off: one copy of the weights in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from flowkit.models import FlowModel
from flowkit.models.injection import ADAPTER, adapter_parameters

Role = Literal["student", "teacher", "fake"]
FAKE = "fake"  # name of the second adapter; the student's is the one that files hold


class Roles:
    """One of three networks at a time, `worn` for the length of a `with` block.

    Attributes:
        model: the student's, which also encodes and decodes.
    """

    def __init__(self, models: Mapping[Role, FlowModel], *, one_base: bool) -> None:
        self.models, self.one_base = dict(models), one_base
        self.model = models["student"]
        self._worn: Role = "student"

    @classmethod
    def three(
        cls,
        model: FlowModel,
        prepare: Callable[[FlowModel], None],
        copied: Callable[[FlowModel], FlowModel] | None = None,
    ) -> Roles:
        """Copies of the network for teacher and fake score; `prepare` makes student and fake trainable.

        `copied` makes the copies, where it is not `twin`.
        """
        make = copied or twin
        models: dict[Role, FlowModel] = {"student": model, "teacher": make(model), "fake": make(model)}
        prepare(models["student"])
        prepare(models["fake"])
        return cls(models, one_base=False)

    @classmethod
    def one(cls, model: FlowModel, prepare: Callable[[FlowModel, str], None]) -> Roles:
        """One base; `prepare(model, adapter)` adds a LoRA of that name."""
        prepare(model, ADAPTER)
        prepare(model, FAKE)
        roles = cls({"student": model, "teacher": model, "fake": model}, one_base=True)
        roles._put_on("student")
        return roles

    @contextmanager
    def wear(self, role: Role) -> Iterator[FlowModel]:
        """Inside, the model's network is that of `role`; a backward pass belongs inside, too.

        (A checkpointed layer is computed again in the backward pass, and only the parameters of the adapter
        that is on take gradients.)
        """
        before = self._worn
        self._put_on(role)
        try:
            yield self.models[role]
        finally:
            self._put_on(before)

    def trainable(self, role: Role) -> dict[str, nn.Parameter]:
        """The parameters that train `role`, by name."""
        if self.one_base:
            return adapter_parameters(self.model, FAKE if role == "fake" else ADAPTER)
        return {n: p for n, p in self.models[role].net.named_parameters() if p.requires_grad}

    def _put_on(self, role: Role) -> None:
        self._worn = role
        if not self.one_base:
            return
        net: Any = self.model.net
        if role == "teacher":
            net.disable_adapters()
        else:
            net.enable_adapters()
            net.set_adapter(FAKE if role == "fake" else ADAPTER)


def twin(model: FlowModel) -> FlowModel:
    """The same model with a network of its own: a frozen copy of the weights; the autoencoder is shared."""
    other = copy.copy(model)
    other.__dict__["net"] = copy.deepcopy(model.net).requires_grad_(False)
    return other
