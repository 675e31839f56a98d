"""A model's files to a folder of quantized weights that are used where they lie.

The folder is made under another name beside the place it is for, and renamed when it is complete. What is finished is
kept in a journal there, so that work that was interrupted goes on where it stopped. Of the model one piece of a tensor
is in memory for each thread, and of the source the tensor at hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.cpu.settings import cpu_settings
from edge_transformer.engine.quantize_checksums import CHECKSUM, REPORT_FILE, Place, checksums
from edge_transformer.engine.quantize_journal import Journal
from edge_transformer.engine.quantize_plan import Item, Quantization, QuantizationPlan, plan_quantization
from edge_transformer.engine.weights import row_order
from edge_transformer.errors import DISK_FULL, CapacityError, FileChangedError, UsageError, storage_error
from edge_transformer.formats.checkpoint import Checkpoint, TensorInfo
from edge_transformer.formats.file_names import SINGLE_FILE
from edge_transformer.formats.gguf import split_paths
from edge_transformer.formats.gguf_reader import metadata_section
from edge_transformer.formats.json_file import read_settings
from edge_transformer.formats.mapping import MappedModelFile
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.planes_file import LAYOUT_VERSION, METADATA_FILE, QUANTIZATION_METHOD
from edge_transformer.formats.planes_writer import PlainTensor
from edge_transformer.formats.quantize import QuantizationError, RowBlock, row_blocks
from edge_transformer.formats.repack import read_vector, repack
from edge_transformer.formats.weight import FORMATS, Plane, Weight, WeightLayout, packed_layout
from edge_transformer.hub.progress import Progress, silent
from edge_transformer.hub.storage import require_free_space
from edge_transformer.memory import HostMemory, bytes_at
from edge_transformer.models.read import read_model

PARTIAL_SUFFIX = ".partial"

_COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_COPIED_FOLDERS = ("additional_chat_templates",)
_LICENCE_PREFIXES = ("license", "licence", "notice", "copying", "use_policy", "gemma_terms")
_SYNC_BYTES = 256 << 20  # written between two calls that wait for the disk


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of the new file. checksum: sha256 of its bytes there. error: of a quantized one."""

    name: str
    role: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: str
    error: QuantizationError | None

    def as_json(self) -> dict[str, object]:
        entry: dict[str, object] = {
            "name": self.name,
            "role": self.role,
            "format": self.format,
            "shape": list(self.shape),
            "bytes": self.nbytes,
            CHECKSUM: self.checksum,
        }
        if self.error is not None:
            entry |= {"relative_rms_error": self.error.relative_rms, "largest_error": self.error.largest}
        return entry


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What was made: the tensors in the order of the file, and the names of those of the source that were left out."""

    path: Path
    quantization: Quantization
    tensors: tuple[TensorReport, ...]
    left_out: tuple[str, ...]
    source_bytes: int
    nbytes: int

    def as_json(self) -> dict[str, object]:
        return {
            "quantization": self.quantization.description,
            **self.quantization.settings(),
            "source_bytes": self.source_bytes,
            "bytes": self.nbytes,
            "left_out": list(self.left_out),
            "tensors": [tensor.as_json() for tensor in self.tensors],
        }


def require_new_folder(out: Path) -> None:
    """Raises UsageError where `out` exists, is no name, or lies in what is no folder: to be told before a model is
    loaded for it.
    """
    if out.name in ("", ".."):
        raise UsageError(f"{out} is no name for a new folder")
    if os.path.lexists(out):
        raise UsageError(f"{out} exists; nothing is overwritten: give another name, or delete it")
    above = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise UsageError(f"{out} cannot be made: {above} is no folder; give OUT as a name in one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{out} cannot be made: {above} cannot be written; give OUT as a name in a folder that can")


def quantize_model(
    source: Path,
    out: Path,
    choice: Quantization,
    threads: int | None = None,
    progress: Progress = silent,
    planned: Callable[[int, int], None] = lambda source_bytes, nbytes: None,
) -> QuantizationReport:
    """Quantize the model at `source` (as open_checkpoint takes it) into the new folder `out`.

    threads: None for the cores this process may use. progress: called as progress(what, bytes done, in all), of the
    source and then of what was written. planned: called before anything is written, with the bytes of the source's
    weights and of the file to be.
    An interrupt, or an error, leaves a folder `out`.partial, from which the same call goes on.

    Raises UsageError when `out` exists or is no name, when `out`.partial is of another call, or for a model quantized
    already; CapacityError for a lack of room on the disk, StorageError for what the system refuses else; NumericError
    for values that cannot be quantized; FormatError, UnsupportedModelError for the source.
    """
    settings = cpu_settings(threads=threads)
    require_new_folder(out)
    checkpoint = open_checkpoint(source)
    try:
        plan = plan_quantization(checkpoint, read_model(checkpoint), choice)
        planned(plan.source_bytes, plan.file.nbytes)
        partial = out.with_name(out.name + PARTIAL_SUFFIX)
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UsageError(f"{partial} is in the way: the folder is made under this name; delete it") from error
        except OSError as error:
            remedy = "give OUT as a name in a folder that can be written"
            raise storage_error(error, f"the folder {out} cannot be made in {out.absolute().parent}", remedy) from error
        identity = _identity(checkpoint, plan, choice)
        with Journal(partial, identity) as journal:
            errors = _write_weights(plan, partial / SINGLE_FILE, journal, settings.threads, settings.isa, progress)
            places = {
                item.info.name: Place(plan.file.offsets[item.info.name], item.result.nbytes) for item in plan.items
            }
            written = checksums(partial / SINGLE_FILE, places, settings.threads, progress)
            report = _report(out, choice, plan, errors, written)
            _write_settings(source, checkpoint, choice, partial)
            if _identity(checkpoint, plan, choice) != identity:
                raise FileChangedError(checkpoint.path, "its files were replaced while it was quantized; start again")
            _write_text(partial / REPORT_FILE, json.dumps(report.as_json(), indent=1) + "\n")
            journal.remove()
        try:
            os.rename(partial, out)
        except OSError as error:
            done = f"the model is complete in {partial}, which cannot be renamed"
            raise storage_error(error, done, f"with that mended, rename it {out.name}") from error
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        if error.errno not in DISK_FULL:
            raise storage_error(
                error, f"{out} cannot be made of {source}", "with that mended, the same command goes on"
            ) from error
        raise CapacityError(
            f"{out.name}{PARTIAL_SUFFIX} in {out.absolute().parent} cannot grow: {error.strerror}; make room, and the "
            "same command goes on, or name a folder elsewhere"
        ) from error
    finally:
        checkpoint.close()
    return report


def _identity(checkpoint: Checkpoint, plan: QuantizationPlan, choice: Quantization) -> dict[str, object]:
    """What has to be the same for work to go on."""
    files = sorted({info.file.path for info in checkpoint.tensors.values()})
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {"source": [list(stat) for stat in stats], "settings": choice.settings(), "bytes": plan.file.nbytes}


def _write_weights(
    plan: QuantizationPlan, path: Path, journal: Journal, threads: int, isa: str, progress: Progress
) -> dict[str, QuantizationError]:
    """Write all tensors that the journal does not have yet; the errors of all quantized ones by name."""
    present = path.stat().st_size if path.exists() else 0
    if journal.finished and present != plan.file.nbytes:
        raise UsageError(f"{path} is not what was written there before; delete {path.parent} and start again")
    # What a file has on the disk may be less than its size: it is written from front to back.
    on_disk = path.stat().st_blocks * 512 if present else 0
    require_free_space(path.parent, plan.file.nbytes - on_disk, "the quantized model", "name a folder elsewhere")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, plan.file.nbytes)
        _write_at(descriptor, 0, np.frombuffer(plan.file.header, np.uint8))
        writer = _Writer(descriptor, plan, journal, _native.instruction_set_index(isa), progress)
        with ThreadPoolExecutor(threads, "ete-quantize") as pool:
            try:
                for item in plan.items:
                    writer.write(item, pool, threads)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                os.fdatasync(descriptor)
                journal.save()
    finally:
        os.close(descriptor)
    return journal.finished


class _Writer:
    """The file while it is written, and how far it is."""

    def __init__(self, descriptor: int, plan: QuantizationPlan, journal: Journal, isa: int, progress: Progress) -> None:
        self._descriptor = descriptor
        self._plan = plan
        self._journal = journal
        self._isa = isa
        self._progress = progress
        self._done = 0
        self._unsaved = 0

    def write(self, item: Item, pool: ThreadPoolExecutor, threads: int) -> None:
        """One tensor, unless it is there."""
        if item.info.name not in self._journal.finished:
            offset = self._plan.file.offsets[item.info.name]
            if isinstance(item.result, WeightLayout):
                error = self._write_quantized(item, item.result, offset, pool, threads)
            else:
                self._write_plain(item.info, item.result, offset)
                error = QuantizationError()
            item.info.file.check_unchanged()
            self._journal.add(item.info.name, error)
            self._unsaved += item.result.nbytes
            if self._unsaved >= _SYNC_BYTES:
                os.fdatasync(self._descriptor)
                self._journal.save()
                self._unsaved = 0
            _release(item.info)
        self._done += item.info.nbytes
        self._tell(0)

    def _write_quantized(
        self, item: Item, result: WeightLayout, offset: int, pool: ThreadPoolExecutor, threads: int
    ) -> QuantizationError:
        source = _source_weight(item)
        error = QuantizationError()
        rows = 0
        for block in _in_order(row_blocks(source, result.format, self._isa, item.info.name), pool, threads):
            for start, values in block.parts:
                _write_at(self._descriptor, offset + start, values)
            error += block.error
            rows += block.rows
            self._tell(item.info.nbytes * rows // result.rows)
        return error

    def _write_plain(self, info: TensorInfo, result: PlainTensor, offset: int) -> None:
        if result.format is info.format:
            _write_at(self._descriptor, offset, bytes_at(info.file.address + info.offset, info.nbytes))
        else:
            _write_at(self._descriptor, offset, np.ascontiguousarray(read_vector(info)).view(np.uint8).reshape(-1))

    def _tell(self, of_tensor: int) -> None:
        self._progress("quantize", self._done + of_tensor, self._plan.source_bytes)


def _in_order(work: Iterator[Callable[[], RowBlock]], pool: ThreadPoolExecutor, threads: int) -> Iterator[RowBlock]:
    """Results of the pieces in their order, a few under way at a time."""
    under_way: deque[Future[RowBlock]] = deque()
    for piece in work:
        under_way.append(pool.submit(piece))
        if len(under_way) > threads + 1:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _source_weight(item: Item) -> Weight:
    """A matrix as it lies in its file, or re-arranged where that is no plain rows in the order of use."""
    info = item.info
    order = None if item.spec is None else row_order(item.spec)
    spec = FORMATS[info.format]
    rows, cols = info.shape
    if spec.block_cols == 1 and order is None:
        layout = WeightLayout(info.format, rows, cols, (Plane(0, cols * spec.file_block_bytes),), info.nbytes)
        return Weight(layout, info.file.address + info.offset, info.file)
    layout = packed_layout(info.format, rows, cols)
    memory = HostMemory(layout.nbytes, what="a matrix to be quantized")
    repack(info, layout, memory.address, order)
    return Weight(layout, memory.address, memory)


def _release(info: TensorInfo) -> None:
    if isinstance(info.file, MappedModelFile):
        info.file.release(info.offset, info.nbytes)


def _write_at(descriptor: int, offset: int, values: npt.NDArray[np.uint8]) -> None:
    """All of the bytes, however few a call takes."""
    rest = values.data
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest = rest[written:]
        offset += written


def _report(
    out: Path,
    choice: Quantization,
    plan: QuantizationPlan,
    errors: dict[str, QuantizationError],
    written: dict[str, str],
) -> QuantizationReport:
    tensors = tuple(
        TensorReport(
            item.info.name,
            "" if item.spec is None else item.spec.role,
            item.result.format.value,
            item.info.shape,
            item.result.nbytes,
            written[item.info.name],
            errors[item.info.name] if item.quantized else None,
        )
        for item in plan.items
    )
    return QuantizationReport(out, choice, tensors, plan.left_out, plan.source_bytes, plan.file.nbytes)


def _write_settings(source: Path, checkpoint: Checkpoint, choice: Quantization, folder: Path) -> None:
    """What is beside the weights: config.json, tokenizer, chat template, licences; or the metadata of a GGUF file."""
    if checkpoint.container == "gguf":
        with contextlib.closing(MappedModelFile(split_paths(checkpoint.path)[0])) as file:
            (folder / METADATA_FILE).write_bytes(metadata_section(file))
        if source.is_dir():
            _copy(source, folder, _licences(source))
        return
    origin = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = read_settings(origin / "config.json")
    if config != checkpoint.metadata:
        raise FileChangedError(origin / "config.json", "it changed while the model was quantized; start again")
    config["quantization_config"] = {
        "quant_method": QUANTIZATION_METHOD,
        "layout_version": LAYOUT_VERSION,
        **choice.settings(),
    }
    _write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    _copy(origin, folder, [name for name in _COPIED_FILES if (origin / name).is_file()] + _licences(origin))
    for name in _COPIED_FOLDERS:
        if (origin / name).is_dir():
            (folder / name).mkdir(exist_ok=True)
            _copy(origin / name, folder / name, [path.name for path in (origin / name).iterdir() if path.is_file()])


def _licences(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.name.lower().startswith(_LICENCE_PREFIXES) and path.is_file()
    )


def _copy(origin: Path, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        shutil.copyfile(origin / name, folder / name)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
