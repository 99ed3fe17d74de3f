"""Keep Hugging Face classes usable for the trainer.

Architectures without a class of vLLM's own (SmolLM3, OLMo 2, GPT-NeoX, Phi) run on its Transformers backend, which
decorates the decoder's Hugging Face class for `torch.compile`, in this process. The trainer's model has the same class,
and would ask for vLLM's configuration. Here the decoration moves to a subclass that vLLM's model alone has.
"""

from typing import Any

from tlt_lightning.engine.vllm.patches.patch import Patch

_as_they_were: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}  # classes of the model that is being made


def _decorate_and_remember(decorate: Any, model: Any, cls: type, *args: Any, **kwargs: Any) -> None:
    _as_they_were.setdefault(cls, (cls.__bases__, dict(vars(cls))))
    decorate(model, cls, *args, **kwargs)


def _init_on_a_subclass(init: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    _as_they_were.clear()
    try:
        init(model, *args, **kwargs)
    finally:
        decorated = {cls: _give_back(cls, *before) for cls, before in _as_they_were.items()}
    for module in model.modules():
        if type(module) in decorated:
            module.__class__ = decorated[type(module)]


def _give_back(cls: type, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    """Take a decoration off a class; return a subclass that has the decoration."""
    added = {name: value for name, value in vars(cls).items() if attributes.get(name) is not value}
    mixed_in = tuple(base for base in cls.__bases__ if base not in bases)
    for name in added:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    cls.__bases__ = bases
    return type(cls.__name__, (cls, *mixed_in), {**added, "__module__": cls.__module__})


PATCH = Patch(
    why="vLLM's Transformers backend decorates the Hugging Face class of a policy in this process, and the trainer's "
    "own model of that class asks for vLLM's configuration: 'Current vLLM config is not set'.",
    versions="0.32",
    around={
        "vllm.model_executor.models.transformers.base.Base._decorate_cls_for_torch_compile": _decorate_and_remember,
        "vllm.model_executor.models.transformers.base.Base.__init__": _init_on_a_subclass,
    },
)
