"""Tasks that a language model learns from prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyber0.config.schema import TaskConfig
    from cyber0.tasks.text.task import Text


def make(config: TaskConfig, **given: Any) -> Text:
    """Return the text task that a config names; `given` are further arguments of Text."""
    from cyber0.tasks.text.head import HeadTask
    from cyber0.tasks.text.task import Text
    from cyber0.tasks.text.top import TopTask

    return {"head": HeadTask, "top": TopTask}.get(config.adapter, Text)(config, **given)
