"""Buffers that forward itself writes, such as batch statistics."""

import torch
from torch import nn


class RunningBuffers:
    """Puts persistent buffers back as they were when a step is skipped.

    The optimizer does not step, but forward has already taken what was not finite into its running
    statistics, where it would stay for good. Which buffers forward writes shows in their version
    counters in the first step; others, however large, cost nothing from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        self.buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
        self.kept: list[torch.Tensor] = []
        self.versions: list[int] | None = None

    def keep(self) -> None:
        """Note them as they are; to be called before forward."""
        if not self.kept:
            self.versions = [buffer._version for buffer in self.buffers]
            self.kept = [buffer.detach().clone() for buffer in self.buffers]
        elif self.buffers:
            torch._foreach_copy_(self.kept, self.buffers)

    def put_back(self, bad: torch.Tensor | bool) -> None:
        """As they were at `keep` if `bad` is set; on a device without waiting for it."""
        if self.versions is not None:
            pairs = zip(self.buffers, self.kept, self.versions, strict=True)
            written = [(buffer, kept) for buffer, kept, v in pairs if buffer._version != v]
            self.buffers, self.kept = ([pair[side] for pair in written] for side in (0, 1))
            self.versions = None
        if isinstance(bad, torch.Tensor):
            right = [torch.where(bad, k, b) for k, b in zip(self.kept, self.buffers, strict=True)]
        elif bad:
            right = self.kept
        else:
            return
        if self.buffers:
            torch._foreach_copy_(self.buffers, right)
