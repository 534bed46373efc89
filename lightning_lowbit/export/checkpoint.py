"""Exports a checkpoint: checks, files, parity report and model card, in a folder that appears when all is done."""

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit.atomic_files import being_written, put_in_place
from lightning_lowbit.checks import choose, some
from lightning_lowbit.export.card import card
from lightning_lowbit.export.folder import RECORD, write_record
from lightning_lowbit.export.formats.base import Format, NoClient, Options, Written, example_input
from lightning_lowbit.export.formats.names import DTYPES
from lightning_lowbit.export.formats.table import FORMATS
from lightning_lowbit.export.merging import merge_adapters, rounding_errors
from lightning_lowbit.export.parity import (
    Parity,
    compare,
    input_amaxes,
    limits_of,
    outputs_difference,
    outputs_limit,
    tokens_of,
)
from lightning_lowbit.export.reading.files import AGAIN
from lightning_lowbit.export.trained_model import TrainedModel, is_language_model, read
from lightning_lowbit.packages import install


@dataclass(frozen=True)
class Exported:
    """An exported folder."""

    folder: Path
    rows: Sequence[Written]  # one for each quantized layer
    bytes: int  # of the folder
    parameters: tuple[int, int]  # numbers of all parameters, and of parameters in few bits
    parity: Parity | None = None  # the report, of a model that takes tokens
    outputs: float | None = None  # the relative difference from the training's, of other models
    why_not: str | None = None  # there is neither, in words

    def compared(self) -> str:
        """Returns the result of the comparison, in lines."""
        if self.outputs is not None:
            return f"outputs, relative difference: {self.outputs:.2g}"
        return str(self.parity) if self.parity is not None else f"Outputs were not compared: {self.why_not}."


def export_checkpoint(
    checkpoint: str | Path,
    format: str,
    output: str | Path,
    *,
    module: str | None = None,
    calibrate: str | Path | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    shape: Sequence[int] | None = None,
    rescale: bool = False,
    merge: bool = False,
    license: str | None = None,
    overwrite: bool = False,
    parity: bool = True,
) -> Exported:
    """Exports a checkpoint to a format that inference engines load, and compares their outputs with the training.

    Args:
        checkpoint: a file, or a folder of shards, of a run with a plugin of this package; no code that it names runs.
        format: a key of ``FORMATS``.
        output: the folder to make.
        module: the class of the trained ``LightningModule``, ``"package.module.Class"``; None for those of recipes.
        calibrate: a text file, over which scales of activations are measured and outputs compared. Without it, those
            that engines need static are an error, and outputs are compared on random tokens.
        tokenizer: ``"bytes"``, a folder or a name on the Hub; None for that of the training, if the checkpoint tells.
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``: of the tensors that are not quantized; None for bf16, or what the
            format takes.
        shape: of an input of a model that takes no tokens, with which ``onnx`` traces it.
        rescale: changes scales where an engine needs others, and tells the error of each layer: it rounds them and
            keeps the codes, or quantizes weights again by the largest scale of layers that engines fuse.
        merge: adds adapters of PEFT to the weights of their base, and rounds the sums to nearest by the base's cast, or
            by the format's own; the report tells the change.
        license: of the model, for its card, such as ``"apache-2.0"``; None for that of the model from which the
            training started, if its folder tells.
        overwrite: replaces ``output`` if an export wrote it, or it is an empty folder.
        parity: loads the result by the format's own client, and raises if it computes something else.

    Returns:
        What was written, and the parity report.

    Raises:
        FileNotFoundError, FileExistsError: there is no checkpoint, or ``output`` exists.
        OSError: ``output`` cannot be written; nothing is left of it then.
        ValueError: the checkpoint cannot be read; the format cannot hold a layer, which the message names with the
            reason; or the exported model computes something else. Nothing is written then.

    Examples:
        >>> exported = export_checkpoint("last.ckpt", "int4", "llama-int4", dtype="fp32", tokenizer="bytes")
        >>> print(exported.parity)
    """
    chosen, dense_dtype = _chosen(format, dtype)
    output = Path(output).expanduser()
    _check_output(output, overwrite, [path for path in (checkpoint, calibrate) if path is not None])
    original = read(checkpoint, module)
    if tokenizer is not None:
        original = replace(original, facts={**original.facts, "tokenizer": tokenizer})
    _check_fit(original, chosen, calibrate, tokenizer, shape, merge, rescale)
    if merge:
        original = merge_adapters(original, chosen, dense_dtype)
    tokens = tokens_of(original, calibrate) if is_language_model(original.model) else None
    amaxes = input_amaxes(original, tokens) if calibrate is not None and tokens is not None else None
    options = Options(rescale, amaxes, dense_dtype, shape)
    try:
        with being_written(output) as partial:
            partial.mkdir()
            rows = _rows(chosen, original, partial, options)
            compared: dict[str, Any] = {"why_not": "it was not asked for"}
            if parity:
                compared = _compared(chosen, original, partial, rows, options, tokens)
            size = sum(path.stat().st_size for path in partial.rglob("*"))
            exported = Exported(output, rows, size, original.parameters, **compared)
            write_record(original, chosen.name, partial)
            (partial / "README.md").write_text(card(exported, original, chosen, license))
            put_in_place(partial, output)
    except Exception as error:  # of the system, or of a library that wraps it
        if (message := _unwritten(error, output)) is not None:
            raise OSError(message) from error
        raise
    return exported


def _rows(format: Format, original: TrainedModel, folder: Path, options: Options) -> Sequence[Written]:
    """Writes a model; returns a row for each layer, whose error includes that of adapters or smoothing."""
    rows = format.write(original, folder, options)
    changes = original.folded if original.unmerged is None else rounding_errors(original)
    return [replace(row, error=max(row.error, changes.get(row.name, 0.0))) for row in rows]


def _chosen(format: str, dtype: str | None) -> tuple[Format, torch.dtype]:
    """Returns a format, and the dtype of tensors that are not quantized."""
    chosen = FORMATS[choose("format", format, FORMATS)]
    held = {name: value for name in DTYPES if (value := getattr(torch, DTYPES[name])) in chosen.dtypes}
    if dtype is not None and choose("dtype", dtype, DTYPES) not in held:
        raise ValueError(
            f"The format {format} holds tensors in {some(held)}, not in {dtype}: leave out dtype (--dtype)."
        )
    dense = chosen.dtypes[0] if dtype is None else held[dtype]
    if chosen.computes_in not in (None, dense):
        rank_zero_warn(
            f"transformers computes with a folder of {format} in {chosen.computes_in} alone, and its other tensors "
            f"will be in {dense}: load it by from_pretrained(folder, dtype={chosen.computes_in})."
        )
    return chosen, dense


def _check_output(output: Path, overwrite: bool, inputs: Sequence[str | Path]) -> None:
    """Raises an error if a folder cannot be made, or must not be replaced."""
    if output.name in ("", ".."):
        raise ValueError(f"output (--output) is a folder to make, such as llama-int4; got {str(output)!r}.")
    for path in inputs:
        if Path(path).expanduser().resolve().is_relative_to(output.resolve()):
            raise ValueError(f"{output} would be replaced, and holds {path}, which is read. Give another folder.")
    if not (output.exists() or output.is_symlink()):  # an OSError in a folder that cannot be entered
        return
    is_export = output.is_dir() and ((output / RECORD).exists() or not any(output.iterdir()))
    if not overwrite:
        remedy = "Give another folder, or overwrite (--overwrite)." if is_export else "Give another folder."
        raise FileExistsError(f"{output} exists. {remedy}")
    if not is_export:
        raise FileExistsError(
            f"{output} is no folder that an export wrote (it has no {RECORD}), and is not replaced. Move or delete it "
            "yourself, or give another folder."
        )


def _check_fit(
    original: TrainedModel,
    format: Format,
    calibrate: str | Path | None,
    tokenizer: str | None,
    shape: Sequence[int] | None,
    merge: bool,
    rescale: bool,
) -> None:
    """Raises an error if a format or a setting does not fit a model; warns if the model will have no tokenizer."""
    if format.needs_network and original.config is None:
        raise ValueError(
            f"The format {format.name} holds one model of transformers, and the trained module has none that holds all "
            "quantized layers: take dequantized, or train with skip for layers beside it."
        )
    if calibrate is not None and not is_language_model(original.model):
        raise ValueError(
            "Calibration takes a causal language model of transformers, which the trained module is not: leave out "
            "calibrate (--calibrate), or take a format whose scales of activations are dynamic."
        )
    if tokenizer is not None and not any(isinstance(part, nn.Embedding) for part in original.model.modules()):
        raise ValueError(
            "tokenizer (--tokenizer) is of a model that takes tokens, and the trained module has no nn.Embedding: "
            "leave it out."
        )
    if shape is not None and (not format.traces or is_language_model(original.model)):
        reason = "the model takes tokens" if format.traces else f"the format {format.name} does not trace the model"
        raise ValueError(f"shape (--shape) is of an input to trace, and {reason}: leave it out.")
    if original.facts.get("tokenizer") is None and format.chat is None and is_language_model(original.model):
        rank_zero_warn(
            "The checkpoint does not tell its tokenizer, so that the exported folder has none, which AutoTokenizer "
            "could load: give --tokenizer bytes, a folder, or a name on the Hugging Face Hub."
        )
    if merge and not original.has_adapters:
        raise ValueError("The trained module has no adapters to merge: leave out merge (--merge).")
    if original.has_adapters and not merge:
        raise ValueError(
            "The trained module has adapters, which no format here holds beside a base. Give merge (--merge), which "
            "adds them to the weights and rounds the sums to few bits; PEFT's save_pretrained writes adapters alone."
        )
    if original.folded and not (rescale or merge):
        raise ValueError(
            f"Smoothing is multiplied into rows of {some([*original.folded])}, and scales of more than a row round "
            "them otherwise than in training. Train with scales of rows (fp8-row, mxfp8), or give rescale (--rescale), "
            "which quantizes these weights again and tells the error of each layer."
        )


# The meaning of errors of the system, and the remedy.
_ADVICE = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "The export does not fit into {folder} ({error}). Nothing was exported: free some space, or give --output on "
    "another disk.",
) | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM),
    "{folder} cannot be written ({error}). Nothing was exported: give --output in a folder of yours.",
)


def _unwritten(error: Exception, output: Path) -> str | None:
    """Returns why the system let no export be written, and a remedy, in words; None if that was not the reason."""
    in_text = re.search(r"os error (\d+)", str(error))  # of safetensors
    number = getattr(error, "errno", None) or (int(in_text[1]) if in_text else None)
    if isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)):  # of numpy
        number = errno.ENOSPC
    parent, name = output.absolute().parent, getattr(error, "filename", None)
    path = parent if name is None else Path(os.fsdecode(name)).absolute()
    if number not in _ADVICE or not (path.is_relative_to(parent) or parent.is_relative_to(path)):
        return None  # such as of another file, which is read
    return _ADVICE[number].format(folder=parent, error=os.strerror(number))


def fitting(original: TrainedModel) -> list[str]:
    """Returns the formats that can hold all quantized layers of a model."""
    return [name for name, format in FORMATS.items() if format.fits(original)]


def explain_formats(original: TrainedModel) -> str:
    """Returns which formats fit a model, in a sentence."""
    if original.has_adapters:
        names = [name for name, format in FORMATS.items() if format.own_cast is not None]
        return (
            "It has adapters: --merge adds them to the weights. Formats fit then that hold the cast of the base, and, "
            f"for layers that they hold, these: {some(names, 20)}. Give one: --format NAME --output DIR."
        )
    if names := fitting(original):
        return f"Formats that hold it: {some(names, 20)}. Give one: --format NAME --output DIR."
    reason = ""
    try:
        FORMATS["dequantized"].check(original)  # which holds the most
    except ValueError as error:
        reason = f"{error} "
    return f"No format holds it. {reason}Leave such layers in high precision in training (skip), or use restore."


def _compared(
    format: Format,
    original: TrainedModel,
    folder: Path,
    rows: Sequence[Written],
    options: Options,
    tokens: Tensor | None,
) -> dict[str, Any]:
    """Returns one of the last fields of :class:`Exported`; an error if the folder's model computes something else."""
    if format.load is None:
        return {"why_not": "the format's client is not a package of Python"}
    example = example_input(original, options)
    is_compared = tokens is not None or (example is not None and format.traces)
    if not is_compared and original.config is None:
        return {"why_not": "the model is no causal language model of transformers"}
    try:
        client = format.load(folder)
    except ValueError as error:
        reason = str(error).removesuffix(f". {AGAIN}").replace(str(folder), "the folder")
        raise ValueError(
            f"The format's client cannot read the export: {reason}. Nothing was exported: take another format, such as "
            "dequantized; parity=False (--no-parity) exports."
        ) from error
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        return {"why_not": f"{package} is not installed: {install(package)}" if package else str(error)}
    except NoClient as error:
        return {"why_not": str(error)}
    if not is_compared:
        return {"why_not": "the model is no causal language model of transformers; its client loads it"}
    if tokens is not None:
        report = compare(original, client, rows, format.weights(original, options), tokens, options.dtype, format.shown)
        report.check()
        chat = None if format.chat is None else format.chat(original, client)
        if chat is not None and not chat.is_same_prompt:
            rank_zero_warn(f"The exported file makes another prompt than the tokenizer of the training: {chat}.")
        return {"parity": replace(report, chat=chat)}
    assert example is not None
    difference, limit = outputs_difference(original, client, example), outputs_limit(limits_of(rows))
    if not difference <= limit:
        raise ValueError(
            f"The exported model computes something else: its output differs by {difference:.3g} of its norm, and "
            f"rounding explains {limit:g}. Nothing was exported; parity=False (--no-parity) exports."
        )
    return {"outputs": difference}
