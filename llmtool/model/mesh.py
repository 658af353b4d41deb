"""The mesh of devices: its axes and how a user names a shape."""

import math

import jax
from jax.sharding import AxisType, Mesh

from llmtool.errors import Contradiction

AXES = ("data", "fsdp", "tensor")  # outermost first: tensor-parallel devices are neighbours


def parse_mesh(text: str, axes: tuple[str, ...] = AXES) -> dict[str, int]:
    """``"data=2,tensor=4"`` -> ``{"data": 2, "fsdp": 1, "tensor": 4}``; an axis left out is 1."""
    shape = dict.fromkeys(axes, 1)
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name not in shape or not size.isdecimal() or int(size) == 0:
            raise Contradiction(
                f"mesh {text!r}: {part!r} is not an axis with a positive size; write {_spell(shape)} "
                f"(axes: {', '.join(axes)})"
            )
        shape[name] = int(size)
    return shape


def make_mesh(shape: str | dict[str, int] | None = None, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh over ``devices`` (default: all, of every process) of a shape such as ``"data=2,fsdp=2,tensor=2"``.

    Without a shape all devices go to ``fsdp``, which holds the largest models. Raises :class:`Contradiction`, with a
    shape that would fit, when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if shape is None:
        shape = {**dict.fromkeys(AXES, 1), "fsdp": len(devices)}
    sizes = parse_mesh(shape) if isinstance(shape, str) else shape
    if math.prod(sizes.values()) != len(devices):
        raise Contradiction(
            f"mesh {_spell(sizes)} is for {math.prod(sizes.values())} devices, but there are {len(devices)}; "
            f"{_spell(_fitted(sizes, len(devices)))} would fit"
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices
    )


def _fitted(sizes: dict[str, int], n_devices: int) -> dict[str, int]:
    """The wished sizes, innermost axis first, as far as each divides what is left; ``fsdp`` takes the rest."""
    out, left = dict.fromkeys(sizes, 1), n_devices
    for name in reversed([name for name in sizes if name != "fsdp"]):
        out[name] = math.gcd(sizes[name], left)
        left //= out[name]
    return {**out, "fsdp": left}


def _spell(sizes: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
