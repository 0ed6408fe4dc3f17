"""Signatures that list every option, for `help` and for completion in notebooks."""

import inspect
from collections.abc import Callable
from typing import TypeVar, get_args, get_type_hints

F = TypeVar("F", bound=Callable[..., object])


def list_options(function: F) -> F:
    """Show the keys of `**options: Unpack[SomeTypedDict]` as parameters in the signature of a function.

    Type checkers read the TypedDict. Notebooks and `help` read the signature at run time, which would only show
    `**options`. The default is shown as `...`, because it depends on the recipe of the data.

    Example:
        >>> @list_options
        ... def train(data: str, **options: Unpack[TrainConfigDict]) -> None: ...
        >>> inspect.signature(train).parameters["epochs"].annotation
        <class 'int'>
    """
    signature = inspect.signature(function)
    own = list(signature.parameters.values())
    assert own[-1].kind is inspect.Parameter.VAR_KEYWORD, "the function has no **options"
    (options,) = get_args(own[-1].annotation)
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)
        for name, kind in get_type_hints(options).items()
    ]
    function.__signature__ = signature.replace(parameters=[*own[:-1], *listed])  # type: ignore[attr-defined]
    return function
