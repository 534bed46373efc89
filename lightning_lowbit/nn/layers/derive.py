"""Classes of converted modules, made from the classes that they are converted from."""

from typing import Any


def derived(base: type, original: Any, **members: Any) -> Any:
    """The class ``Quant…`` of a base and the class that is converted; pickled by the latter."""

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return _rebuilt, (original,), *rest

    members = {"__module__": base.__module__, "__reduce_ex__": reduce, **members}
    return type(f"Quant{original.__name__}", (base, original), members)


def _rebuilt(original: type) -> Any:
    from lightning_lowbit.nn.layers.classes import converted_class  # which imports every kind of layer

    cls: Any = converted_class(original)
    return cls.__new__(cls)
