"""The checkpoints of a run as files have them: names, shapes, and one tensor at a time.

Formats: safetensors (one file, or shards with an index), torch.save (read with weights_only, one
file or shards with an index), and PyTorch's distributed checkpoints.  Nothing in a checkpoint is
ever executed, and none is believed: how much is read, how deep and how large, is bounded here.
"""

from __future__ import annotations

import abc
import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from .._util import files, integers
from . import pickles

METADATA = ".metadata"  # Of a distributed checkpoint; written when all ranks are done.
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Files beside the weights that end like them.
_OTHER_FILES = re.compile(
    r"(optimizer|scheduler|rng_state|training_args|scaler|random_states|zero_pp_rank|optim_)"
)
_STATES = ("state_dict", "model_state_dict", "model", "module")
_CONFIGS = ("model_args", "hyper_parameters", "config", "model_config", "args")
_STEPS = ("global_step", "step", "iter_num", "iteration", "iter", "train_step", "current_step")
_STEP_IN_NAME = re.compile(
    r"(?:step|iter(?:ation)?|checkpoint|ckpt|update)s?[-_=]?(\d+)", re.IGNORECASE
)

_SHARDS_MAX = 4096
_ENTRIES_MAX = 1 << 18  # Of the dictionaries of a file, and of a zip archive.
_DEPTH_MAX = 32  # Of dictionaries in dictionaries.
_NAME_MAX = 1024
_PACKED_BYTES_MAX = 64 << 20  # Of the packed files of an archive, unpacked: it should have none.
_TIMES_ON_DISK_MAX = 4  # A tensor's bytes to its checkpoint's: that of DCP may be packed.


class Unreadable(RuntimeError):
    """This checkpoint cannot be read, perhaps not yet; the text says which and why."""


class Checkpoint(abc.ABC):
    """One checkpoint, open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}  # Of the model's tensors.
        self.config: dict[str, Any] = {}  # What the checkpoint itself tells of the model.
        self.step: Optional[int] = None  # As told inside it.
        self.no_step = ""  # Why what is told inside it is none.
        self.disk_bytes = _disk_bytes(path)

    @abc.abstractmethod
    def _read(self, name: str) -> Tensor:
        """One of `shapes`, whatever it is."""

    def tensor(self, name: str) -> Tensor:
        """One of `shapes`, which has been found to be a plain matrix of floats.  Raises
        Unreadable."""
        try:
            found = self._read(name)
        except Unreadable:
            raise
        except Exception as e:  # safetensors and DCP have error classes of their own.
            raise _reading(self.path, e.__cause__ or e) from e
        why = _why_not_plain(found)
        if why is None and self._too_large(found.numel() * found.element_size()):
            why = f"{list(found.shape)} is more than its {self.disk_bytes} bytes on disk can hold"
        if why is not None:
            raise Unreadable(f"{self.path}: {name}: {why}")
        return found

    def _too_large(self, size: int) -> bool:
        return size > _TIMES_ON_DISK_MAX * self.disk_bytes

    def _tell_step(self, content: dict[Any, Any]) -> None:
        """What a dictionary tells of the step, if nothing did before."""
        if self.step is not None:
            return
        for key in _STEPS:
            try:
                self.step = _number(content.get(key))
            except ValueError as e:
                self.no_step = self.no_step or f"its {key}: {e}"
            if self.step is not None:
                return


def _reading(path: Path, error: BaseException) -> Unreadable:
    text = str(error).strip().splitlines()
    return Unreadable(f"{path}: {type(error).__name__}: {text[0] if text else 'no reason given'}")


def _why_not_plain(tensor: Tensor) -> Optional[str]:
    """None for a dense tensor of floats of its own; norms of anything else would mean nothing."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        return f"it is {kind}, no dense matrix"
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"it is a {type(tensor).__name__}, no plain tensor"
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        # Smaller floats and integers stand for others by scales that are not applied here.
        return f"it has {str(tensor.dtype).removeprefix('torch.')}s, no plain floats"
    if tensor.device.type != "cpu":
        return f"it is on {tensor.device}, not in the file"
    return None


# ---- safetensors ----


class _SafeTensors(Checkpoint):
    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        super().__init__(path)
        try:
            from safetensors import safe_open
        except ImportError:
            raise Unreadable(f"{path}: it takes the package safetensors (pip install)") from None
        self._open: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                    self._open[name] = opened
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                told = opened.metadata() or {}
            except Exception as e:  # The library has an error class of its own.
                raise _reading(file, e) from e
            self._tell_step(told)

    def _read(self, name: str) -> Tensor:
        found: Tensor = self._open[name].get_tensor(name)
        return found


# ---- torch.save ----


def _flat(state: dict[Any, Any]) -> dict[str, Tensor]:
    """Its tensors, and those of dictionaries in it.  Raises ValueError: one may hold itself, and
    few of them may stand for very many."""
    found: dict[str, Tensor] = {}
    waiting: list[tuple[dict[Any, Any], str, int]] = [(state, "", 1)]
    entries = 0
    while waiting:
        inner, prefix, depth = waiting.pop()
        if depth > _DEPTH_MAX:
            raise ValueError(f"its dictionaries are nested more than {_DEPTH_MAX} deep")
        entries += len(inner)
        if entries > _ENTRIES_MAX:
            raise ValueError(f"its dictionaries have more than {_ENTRIES_MAX} entries")
        for key, value in inner.items():
            if not isinstance(value, (Tensor, dict)):
                continue
            name = f"{prefix}{key}"
            if len(name) > _NAME_MAX:
                raise ValueError(f"a name in it is longer than {_NAME_MAX} characters")
            if isinstance(value, Tensor):
                found[name] = value
            elif not str(key).startswith("optim"):
                waiting.append((value, f"{name}.", depth + 1))
    return found


def _number(value: Any) -> Optional[int]:
    """A step as files tell it; None for what is no number at all.  Raises ValueError for one that
    is none of a step."""
    if isinstance(value, Tensor) and value.numel() == 1 and _why_not_plain(value.float()) is None:
        value = value.item()
    if isinstance(value, str):
        if not value.isnumeric():
            return None
        digits = value.isascii() and len(value) <= len(str(integers.STEP_MAX))
        return integers.step(int(value) if digits else value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return integers.step(value)


def _check_archive(file: Path) -> None:
    """A torch.save file has its tensors as they are, and little else.  Raises ValueError, OSError,
    zipfile.BadZipFile."""
    with files.open_regular(file) as opened:
        if not zipfile.is_zipfile(opened):  # As torch saved before 2020.
            opened.seek(0)
            pickles.check_first(opened.read(pickles.BYTES_MAX))
            return
        opened.seek(0)
        with zipfile.ZipFile(opened) as archive:
            entries = archive.infolist()
            if len(entries) > _ENTRIES_MAX:
                raise ValueError(f"its archive has more than {_ENTRIES_MAX} files")
            packed = sum(e.file_size for e in entries if e.compress_type != zipfile.ZIP_STORED)
            if packed > _PACKED_BYTES_MAX:
                raise ValueError(f"its archive is packed and unpacks to {packed} bytes")
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    with archive.open(entry) as pickled:
                        pickles.check(pickled.read(pickles.BYTES_MAX + 1))


class _TorchSaved(Checkpoint):
    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        super().__init__(path)
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            content = self._load(file)
            if not isinstance(content, dict):
                raise Unreadable(f"{file}: it holds a {type(content).__name__}, no state_dict")
            state = next((content[k] for k in _STATES if isinstance(content.get(k), dict)), content)
            try:
                self._tensors.update(_flat(state))
            except ValueError as e:
                raise Unreadable(f"{file}: {e}") from e
            for key in _CONFIGS:
                if isinstance(content.get(key), dict):
                    self.config.update(content[key])
            self._tell_step(content)
        self.shapes = {name: tuple(t.shape) for name, t in self._tensors.items()}

    @staticmethod
    def _load(file: Path) -> Any:
        try:
            _check_archive(file)
            try:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as e:
                if "mmap" not in str(e):  # Files of before 2020 cannot be mapped.
                    raise
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as e:
            if "Weights only load failed" in str(e):
                raise Unreadable(
                    f"{file}: it is damaged or holds more than tensors and plain values, which is "
                    "never executed here (torch.load with weights_only=True refuses it)"
                ) from e
            raise _reading(file, e) from e
        except Exception as e:  # The file decides what its unpickling raises.
            raise _reading(file, e) from e

    def _read(self, name: str) -> Tensor:
        return self._tensors[name]


# ---- distributed checkpoints ----

_METADATA_HOMES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.hf_storage",
)
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}


class _PlainMetadata(pickle.Unpickler):
    """Takes what DCP writes into .metadata and nothing that could do something else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        found: Any = None
        if module == "torch":
            found = getattr(torch, name, None)
        elif module in _METADATA_HOMES:
            found = super().find_class(module, name)
        own_class = isinstance(found, type) and found.__module__ == module
        if not own_class and not isinstance(found, torch.dtype):
            raise pickle.UnpicklingError(f"{module}.{name} has no business in a {METADATA}")
        return found


class _Distributed(Checkpoint):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        try:
            content = files.read(path / METADATA, pickles.BYTES_MAX)
            pickles.check(content)
            metadata = _PlainMetadata(io.BytesIO(content)).load()
            entries = dict(metadata.state_dict_metadata)
            for file in {str(info.relative_path) for info in metadata.storage_data.values()}:
                _inside(path, file)
        except Unreadable:
            raise
        except Exception as e:  # The file decides what its unpickling raises.
            raise _reading(path / METADATA, e) from e

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return metadata

        self._reader = Reader(path)
        self._types: dict[str, torch.dtype] = {}
        for name, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata) and not name.startswith("optim"):
                self.shapes[name] = tuple(entry.size)
                self._types[name] = entry.properties.dtype
        for name in [n for n, shape in self.shapes.items() if not shape]:
            if name.rpartition(".")[2] in _STEPS and self.step is None:
                self._tell_step({name.rpartition(".")[2]: self._read(name)})

    def _read(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        size = math.prod(self.shapes[name]) * self._types[name].itemsize
        if self._too_large(size):
            raise Unreadable(
                f"{self.path}: {name}: {list(self.shapes[name])} is more than its "
                f"{self.disk_bytes} bytes on disk can hold"
            )
        wanted = {name: torch.empty(self.shapes[name], dtype=self._types[name])}
        load(wanted, storage_reader=self._reader, no_dist=True)
        return wanted[name]


# ---- what lies in a folder ----


def _inside(folder: Path, name: str) -> Path:
    """A file that a checkpoint names as its own.  Raises Unreadable for one that lies elsewhere,
    is not there, or is no file."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise Unreadable(f"{folder}: it names {integers.shown(name)}, which is not in its folder")
    why = files.why_no_file(folder / name)
    if why is not None:
        raise Unreadable(f"{folder / name}: {why}")
    if not (folder / name).is_file():
        raise Unreadable(f"{folder / name}: it is not there (yet)")
    return folder / name


def _weights_in(folder: Path) -> list[Path]:
    """The files of a folder that is one checkpoint in the way of Hugging Face; else none."""
    for index in _INDICES:
        if (folder / index).is_file():
            try:
                names = files.read_json(folder / index)["weight_map"].values()
                names = sorted({str(name) for name in names})
            except (ValueError, KeyError, AttributeError, OSError) as e:
                raise _reading(folder / index, e) from e
            if len(names) > _SHARDS_MAX:
                raise Unreadable(f"{folder / index}: it names more than {_SHARDS_MAX} files")
            return [_inside(folder, name) for name in names]
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    return []


def is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        names = (METADATA, *_INDICES, "model.safetensors", "pytorch_model.bin")
        return any((path / name).is_file() for name in names)
    return path.suffix in SUFFIXES and not _OTHER_FILES.match(path.name)


def find(directory: Path, refuse: Callable[[Path, Exception], None]) -> list[Path]:
    """The checkpoints in a folder, or the folder itself if it is one; links are followed once.
    What cannot even be looked at is told to `refuse`.  Raises OSError for the folder."""
    if is_checkpoint(directory):
        return [directory]
    found: dict[Path, Path] = {}
    for entry in sorted(directory.iterdir()):
        try:
            if entry.name.startswith(".") or not is_checkpoint(entry):
                continue
            real = entry.resolve(strict=True)
            if real not in found or found[real].is_symlink():
                found[real] = entry
        except FileNotFoundError:
            if entry.is_symlink():
                refuse(entry, Unreadable("it is a link to nothing"))
            # Else it was deleted since.
        except Exception as e:  # A link to itself is a RuntimeError before Python 3.13.
            why = files.why_no_file(entry)
            refuse(entry, e if why is None else Unreadable(why))
    return list(found.values())


def signature(path: Path) -> str:
    """Changes whenever a file of the checkpoint does: names, sizes and times of change.  Raises
    OSError if it is gone."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    parts = []
    for file in files:
        told = file.stat()
        parts.append(f"{file.name}:{told.st_size}:{told.st_mtime_ns}")
    return "|".join(parts)


def step_of_name(path: Path) -> Optional[int]:
    """The number behind a word such as "step" or "checkpoint", else the last number there is."""
    name = path.name if path.is_dir() else path.stem
    told = _STEP_IN_NAME.findall(name) or re.findall(r"\d+", name)
    return int(told[-1]) if told else None


def _trainer_state(folder: Path) -> dict[str, Any]:
    """What Hugging Face's trainer leaves beside the weights."""
    try:
        return files.read_json(folder / "trainer_state.json")
    except (OSError, ValueError):
        return {}


def _disk_bytes(path: Path) -> int:
    """Of a checkpoint's files, a few folders deep."""
    if not path.is_dir():
        return path.stat().st_size
    deep = (path.glob("*/" * depth + "*") for depth in range(3))
    return sum(file.stat().st_size for each in deep for file in each if file.is_file())


def read(path: Path) -> Checkpoint:
    """Opens it.  Raises Unreadable for what is damaged or not written to its end."""
    checkpoint: Checkpoint
    if path.is_dir() and (path / METADATA).is_file():
        checkpoint = _Distributed(path)
    else:
        weights = _weights_in(path) if path.is_dir() else [_inside(path.parent, path.name)]
        if not weights:
            raise Unreadable(f"{path}: it is not there (yet)")
        kind = _SafeTensors if weights[0].suffix == ".safetensors" else _TorchSaved
        checkpoint = kind(path, weights)
    if path.is_dir() and checkpoint.step is None:
        checkpoint._tell_step(_trainer_state(path))
    if not checkpoint.shapes:
        raise Unreadable(f"{path}: there is no tensor in it")
    return checkpoint


def step_of(checkpoint: Checkpoint) -> int:
    """The optimizer step that it was saved at.  Raises Unreadable if nothing tells it, or what
    tells it is no step: another number in its name may be anything."""
    path = checkpoint.path
    name = path.name if path.is_dir() else path.stem
    step = step_of_name(path) if _STEP_IN_NAME.search(name) else None
    step = checkpoint.step if step is None else step
    if step is None and checkpoint.no_step:
        raise Unreadable(f"{path}: {checkpoint.no_step}")
    step = step_of_name(path) if step is None else step
    if step is None:
        raise Unreadable(
            f"{path}: neither its name nor its content ({', '.join(_STEPS)}) tells its step"
        )
    try:
        return integers.step(step)
    except ValueError as e:
        raise Unreadable(f"{path}: its name: {e}") from e
