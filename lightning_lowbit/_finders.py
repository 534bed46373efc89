"""Finders of modules that lie elsewhere: under former names, for one version, and of recipes beside the package.

They derive from no class of ``importlib.abc``, which would import more of Python before a command runs.
"""

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from os.path import dirname, isfile, join
from types import ModuleType
from typing import Any

# Former names, and the modules that hold their contents now, both without the package's name.
MOVED = {
    "callbacks.monitors.alerts": ("callbacks.monitors.base",),
    "callbacks.recovery.copies": ("callbacks.recovery.snapshots",),
    "callbacks.recovery.gentle_steps": ("callbacks.learning_rates",),
    "callbacks.recovery.step_losses": ("callbacks.recovery.spike_rollback",),
    "export.calibration": ("export.parity",),
    "export.compressed": ("export.loading",),
    "export.formats.gguf.chat": ("export.formats.gguf.client",),
    "export.formats.holding": ("export.formats.compressed_tensors",),
    "export.formats.usage": ("export.card",),
    "export.record": ("export.folder",),
    "export.source": ("export.trained_model",),
    "kernels.cpu.patches": ("kernels.cpu.products",),
    "kernels.delayed": ("kernels.products",),
    "kernels.gpu.constants": ("kernels.numbers",),
    "kernels.native": ("kernels.packing",),
    "kernels.patches": ("kernels.products",),
    "kernels.stacks": ("kernels.operands",),
    "metrics.devices": ("callbacks.monitors.throughput",),
    "metrics.runs": ("metrics.spikes",),
    "metrics.swiglu": ("metrics.outliers",),
    "nn.amax": ("nn.state.amax",),
    "nn.attention.hosts": ("nn.attention.modules",),
    "nn.attention.operands": ("nn.attention.function",),
    "nn.calls": ("nn.core.calls",),
    "nn.casts.grouping": ("nn.layers.grouped",),
    "nn.casts.plan": ("nn.casts.traits",),
    "nn.casts_from_yaml": ("nn.casts.from_yaml",),
    "nn.conversion.grouping": ("nn.conversion.convert",),
    "nn.conversion.inventory": ("nn.layers.classes",),
    "nn.conversion.layers": ("nn.layers.classes", "nn.layers.layer"),
    "nn.conversion.moe": ("nn.conversion.defaults",),
    "nn.conversion.patterns": ("patterns", "nn.conversion.names"),
    "nn.core.derivatives": ("nn.core.inputs",),
    "nn.core.frozen": ("nn.core.saving",),
    "nn.core.how": ("nn.core.function",),
    "nn.function": ("nn.core.function",),
    "nn.gemm": ("nn.core.gemm",),
    "nn.keys": ("nn.state.keys", "nn.layers.layer"),
    "nn.layers.derive": ("nn.layers.registry",),
    "nn.layers.frozen": ("nn.core.saving",),
    "nn.layers.host": ("nn.layers.composite",),
    "nn.layers.linear": ("nn.layers.known_linears",),
    "nn.layers.window": ("nn.core.window",),
    "nn.linear": ("nn.layers.layer", "nn.layers.registry"),
    "nn.native.layer": ("nn.layers.native",),
    "nn.operands": ("nn.core.operands",),
    "nn.plan": ("nn.casts.traits",),
    "nn.presets": ("nn.casts.presets",),
    "nn.saving": ("nn.core.saving",),
    "nn.sharded.eligible": ("nn.sharded.gather",),
    "nn.sharded.parallel": ("nn.core.parallel",),
    "nn.watch": ("nn.core.watch",),
    "optim.adamw": ("optim.adam",),
    "optim.batch": ("optim.passes", "optim.optimizer"),
    "optim.clipping": ("optim.rules", "optim.passes"),
    "optim.guarded_adam": ("optim.adam",),
    "optim.guarded_optimizer": ("optim.optimizer", "optim.checked"),
    "optim.guards": ("optim.rules", "optim.optimizer"),
    "optim.kernel_passes": ("optim.kernels",),
    "optim.options": ("optim.rules",),
    "optim.spam": ("optim.adam",),
    "optim.stable_spam": ("optim.adam",),
    "precision.checkpoints.planned": ("precision.state", "precision.base"),
    "precision.checkpoints.weights": ("precision.checkpoints.files",),
    "precision.fp4": ("precision.formats",),
    "precision.fp8": ("precision.formats",),
    "precision.integer": ("precision.formats",),
    "precision.ternary": ("precision.formats",),
    "quant.refusals": ("quant.cast",),
    "quant.surrogate": ("quant.operand",),
    "recipes.adapters": ("recipes.tuning.adapters",),
    "recipes.preferences": ("recipes.tuning.preferences",),
    "report.cast_words": ("report.contents",),
    "report.console": ("report.tables",),
}
# Former names of classes in these modules.
RENAMED = {
    "CastPlan": "CastTraits",
    "Host": "CompositeLayer",
    "Plan": "CastTraits",
    "Product": "PartLayer",
    "Settings": "FrozenDict",
}
_PACKAGE = "lightning_lowbit."
_INSTALLED = join(dirname(__file__), "recipes", "__init__.py")
_RECIPES = join(dirname(dirname(__file__)), "recipes", "__init__.py")


class _FormerNames:
    """Finds modules under their former names, and makes them of those that hold their contents now.

    Importing one, as pickles of classes do, warns.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_former = fullname.startswith(_PACKAGE) and fullname.removeprefix(_PACKAGE) in MOVED
        return ModuleSpec(fullname, self, is_package=True) if is_former else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        names = [_PACKAGE + name for name in MOVED[module.__name__.removeprefix(_PACKAGE)]]
        sources = [importlib.import_module(name) for name in names]

        def __getattr__(name: str) -> Any:
            for current in (name, RENAMED.get(name, name)):
                for source in sources:
                    if hasattr(source, current):
                        return getattr(source, current)
            raise AttributeError(f"module {module.__name__!r}, now {' and '.join(names)}, has no attribute {name!r}")

        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        warnings.warn(
            f"{module.__name__} is now {' and '.join(names)}; the former name goes with version 0.3.",
            DeprecationWarning,
            stacklevel=2,
        )


class _Recipes:
    """Finds the recipes beside the sources, before another clone's that is installed; of a wheel they are inside."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != f"{_PACKAGE}recipes" or isfile(_INSTALLED) or not isfile(_RECIPES):
            return None
        return spec_from_file_location(fullname, _RECIPES, submodule_search_locations=[dirname(_RECIPES)])


def install() -> None:
    """Lets former names be imported, and ``lightning_lowbit.recipes`` from the sources."""
    sys.meta_path.insert(0, _Recipes())
    sys.meta_path.append(_FormerNames())
